# SPDX-License-Identifier: Apache-2.0
"""The GPT of `plain_gpt.py` in PyTorch, as one writes it there: after nanoGPT, for a CPU.

The same sizes and as many parameters; learned positions, LayerNorm, GELU (tanh), the table of the
embedding as output projection, attention by `scaled_dot_product_attention`, clipping, and AdamW in
its fused form, all in float32.
"""

import torch
from plain_gpt import Sizes, random_batch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
  """Attention and MLP, each after a norm and beside a residual."""

  def __init__(self, sizes: Sizes):
    super().__init__()
    D, N, H, F = sizes.model, sizes.heads, sizes.head, sizes.ffn
    self.heads, self.head = N, H
    self.attention_norm, self.mlp_norm = nn.LayerNorm(D), nn.LayerNorm(D)
    self.qkv, self.out = nn.Linear(D, 3 * N * H), nn.Linear(N * H, D)
    self.up, self.down = nn.Linear(D, F), nn.Linear(F, D)

  def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
    B, T, _ = x_BTD.shape
    qkv = self.qkv(self.attention_norm(x_BTD)).view(B, T, 3, self.heads, self.head)
    q_BNTH, k_BNTH, v_BNTH = qkv.permute(2, 0, 3, 1, 4)
    y_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True)
    x_BTD = x_BTD + self.out(y_BNTH.transpose(1, 2).flatten(2))
    h_BTF = functional.gelu(self.up(self.mlp_norm(x_BTD)), approximate="tanh")
    return x_BTD + self.down(h_BTF)


class Gpt(nn.Module):
  """The model with its loss."""

  def __init__(self, sizes: Sizes):
    super().__init__()
    self.token = nn.Embedding(sizes.vocab, sizes.model)
    self.position = nn.Embedding(sizes.time, sizes.model)
    self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
    self.norm = nn.LayerNorm(sizes.model)
    for name, parameter in self.named_parameters():
      if parameter.ndim > 1:
        nn.init.normal_(parameter, std=0.02)
      elif name.endswith("bias"):
        nn.init.zeros_(parameter)

  def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy, in nats a token."""
    x_BTD = self.token(inputs_BT) + self.position.weight
    for layer in self.layers:
      x_BTD = layer(x_BTD)
    logits_BTV = functional.linear(self.norm(x_BTD), self.token.weight)
    return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class TorchGpt:
  """The train step as an object: build once, then call `step()` as often as wanted."""

  def __init__(self, sizes: Sizes, *, compiled: bool):
    """If `compiled`, model and loss are given to `torch.compile`, which needs a C++ compiler."""
    torch.manual_seed(0)
    self.sizes = sizes
    self.model = Gpt(sizes)
    self.loss = torch.compile(self.model) if compiled else self.model
    # Rate, betas and decay are those of plain_gpt.py.
    self.optimizer = torch.optim.AdamW(
      self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    self.num_steps = 0

  @property
  def num_parameters(self) -> int:
    return sum(parameter.numel() for parameter in self.model.parameters())

  def step(self) -> float:
    """Takes one step on a fresh batch and returns the loss before it."""
    batch = random_batch(self.num_steps, self.sizes)
    loss = self.loss(*(torch.from_numpy(tokens).long() for tokens in batch))
    loss.backward()
    nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.optimizer.step()
    self.optimizer.zero_grad(set_to_none=True)
    self.num_steps += 1
    return loss.item()
