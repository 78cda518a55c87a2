# SPDX-License-Identifier: Apache-2.0
"""The peer of GPT: a GPT-2 as nanoGPT writes it, in torch.

Learned positions, LayerNorm, biases, GELU (tanh), one product for queries, keys and values, the
embedding's table as output projection; float32 parameters, bfloat16 autocast.
"""

from typing import Any

import torch
import torch_fp8
import torch_training
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
  """One layer."""

  def __init__(self, facts: dict[str, Any]):
    super().__init__()
    dim, inner, self._head = facts["model"], facts["heads"] * facts["head"], facts["head"]
    linear = torch_fp8.Linear if facts["fp8"] else nn.Linear
    self.attention_norm, self.mlp_norm = (nn.LayerNorm(dim, facts["norm_epsilon"]) for _ in "am")
    self.qkv, self.output = linear(dim, 3 * inner), linear(inner, dim)
    self.up, self.down = linear(dim, facts["ffn"]), linear(facts["ffn"], dim)

  def forward(self, x_BTD: Tensor) -> Tensor:
    """Returns the layer's output, [B, T, D]."""
    parts = self.qkv(self.attention_norm(x_BTD)).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (-1, self._head)).transpose(1, 2) for part in parts)
    y_BNTH = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x_BTD = x_BTD + self.output(y_BNTH.transpose(1, 2).flatten(2))
    hidden_BTF = functional.gelu(self.up(self.mlp_norm(x_BTD)), approximate="tanh")
    return x_BTD + self.down(hidden_BTF)


class Gpt(nn.Module):
  """The model with its loss."""

  def __init__(self, facts: dict[str, Any]):
    super().__init__()
    self.tokens = nn.Embedding(facts["vocab"], facts["model"])
    self.positions = nn.Embedding(facts["time"], facts["model"])
    self.blocks = nn.ModuleList(Block(facts) for _ in range(facts["layers"]))
    self.norm = nn.LayerNorm(facts["model"], facts["norm_epsilon"])
    for name, weight in self.named_parameters():
      if weight.ndim > 1:
        nn.init.normal_(weight, std=facts["init_std"])
      elif name.endswith("bias"):
        nn.init.zeros_(weight)

  def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats."""
    x_BTD = self.tokens(inputs_BT) + self.positions.weight[: inputs_BT.shape[1]]
    for block in self.blocks:
      x_BTD = block(x_BTD)
    logits_BTV = functional.linear(self.norm(x_BTD), self.tokens.weight)
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make(facts: dict[str, Any], device: torch.device) -> nn.Module:
  """Returns the model of an experiment's sizes.

  Raises:
    ValueError: It would have another number of parameters.
  """
  with torch_training.made_on(device, torch.float32):
    model = Gpt(facts)
  count = sum(weight.numel() for weight in model.parameters())
  if count != facts["parameters"]:
    raise ValueError(f"{count} parameters here, {facts['parameters']} in the experiment")
  return model


if __name__ == "__main__":
  torch_training.run(make)
