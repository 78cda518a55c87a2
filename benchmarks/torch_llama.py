# SPDX-License-Identifier: Apache-2.0
"""The peer of LLaMA and Mixtral: transformers' model, and peft's adapters.

Random weights, nothing recomputed. Adapters are of all seven linear maps of a block. All weights
are of the experiment's dtype, and AdamW's moments too; peft would make adapters float32, which is
slower. Compiled, transformers gives its own attention a mask, with which torch has only slower
kernels: ours here says that it is causal.
"""

from typing import Any

import peft
import torch
import torch_fp8
import torch_training
import transformers
from torch import Tensor, nn
from torch.nn import functional

ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def causal(
  module: nn.Module, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
  """Returns attention [B, T, N, H] of as many heads of keys, as transformers calls it."""
  scale = options["scaling"]
  y_BNTH = functional.scaled_dot_product_attention(
    q_BNTH, k_BKTH, v_BKTH, is_causal=True, scale=scale
  )
  return y_BNTH.transpose(1, 2).contiguous(), None


class WithLoss(nn.Module):
  """A model of logits with the cross-entropy that transformers takes of them, in float32."""

  def __init__(self, model: nn.Module):
    super().__init__()
    self.model = model

  def forward(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the mean over tokens, in nats."""
    logits_BTV = self.model(input_ids=inputs_BT, use_cache=False).logits
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def make(
  facts: dict[str, Any], device: torch.device, with_loss: type[WithLoss] = WithLoss
) -> nn.Module:
  """Returns the model of an experiment's sizes, in full or with adapters.

  Raises:
    ValueError: It would train another number of parameters.
  """
  kind, experts = transformers.LlamaConfig, {}
  if facts["experts"]:
    kind = transformers.MixtralConfig
    experts = {
      "num_local_experts": facts["experts"],
      "num_experts_per_tok": facts["experts_per_token"],
      "sliding_window": None,
    }
  config = kind(
    vocab_size=facts["vocab"],
    hidden_size=facts["model"],
    intermediate_size=facts["ffn"],
    num_hidden_layers=facts["layers"],
    num_attention_heads=facts["heads"],
    num_key_value_heads=facts["kv_heads"],
    head_dim=facts["head"],
    max_position_embeddings=facts["time"],
    rms_norm_eps=facts["norm_epsilon"],
    rope_parameters={"rope_type": "default", "rope_theta": facts["rope_theta"]},
    initializer_range=facts["init_std"],
    tie_word_embeddings=False,
    **experts,
  )
  transformers.AttentionInterface.register("causal", causal)
  dtype = getattr(torch, facts["weight_dtype"])
  with torch_training.made_on(device, dtype):
    model: Any = transformers.AutoModelForCausalLM.from_config(
      config, attn_implementation="causal", dtype=dtype
    )
    if facts["fp8"]:
      torch_fp8.convert(model.model)
    if rank := facts["lora_rank"]:
      adapters = peft.LoraConfig(
        r=rank, lora_alpha=rank, lora_dropout=0.0, target_modules=ADAPTED, task_type="CAUSAL_LM"
      )
      model = peft.get_peft_model(model, adapters, autocast_adapter_dtype=False)
  count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
  if count != facts["trained"]:
    raise ValueError(f"{count} trained parameters here, {facts['trained']} in the experiment")
  return with_loss(model.train())


if __name__ == "__main__":
  torch_training.run(make, transformers=transformers.__version__, peft=peft.__version__)
