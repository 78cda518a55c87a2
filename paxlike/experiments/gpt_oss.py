# SPDX-License-Identifier: Apache-2.0
"""gpt-oss (OpenAI, 2025): experts with biases, attention sinks, a window in every other layer."""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Interleaved, Matrix, Rules, Same
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.moe import Moe
from paxlike.registry import register

# Rotary positions of configurations that do not specify them.
_YARN = {
  "rope_type": "yarn",
  "factor": 32.0,
  "original_max_position_embeddings": 4096,
  "truncate": False,
}


class GptOss(Moe, Llama):
  """The gpt-oss family."""

  VOCAB_SIZE = 201_088
  MAX_SEQ_LEN = 131_072
  MODEL_DIMS = 2880
  HIDDEN_DIMS = 2880
  NUM_HEADS = 64
  NUM_KV_HEADS = 8
  DIMS_PER_HEAD = 64
  NUM_EXPERTS_PER_TOKEN = 4
  BALANCE_LOSS_WEIGHT = 0.001
  WINDOW: ranges.Positive = 128  #: Attention window of local layers, including the current token.
  ROPE_THETA = 150_000.0
  ROPE_SCALING = "yarn"
  ROPE_FACTOR = 32.0
  ROPE_ORIGINAL_LENGTH = 4096

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    local = self.block()
    local.attention.window = self.WINDOW
    return [local, self.block()]

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.sinks = self.init()
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope = super().rope()
    if self.ROPE_FACTOR is not None and self.ROPE_SCALING == "yarn":
      rope.scaling.truncate = False
    return rope

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    linear.use_bias = role != "head"
    return linear

  def experts(self, dense: fdl.Partial[layers.Mlp]) -> fdl.Partial[layers.Experts]:
    experts = super().experts(dense)
    experts.activation = layers.clamped_swiglu
    return experts

  def expert_linear(self, role: str) -> fdl.Partial[layers.ExpertLinear]:
    linear = super().expert_linear(role)
    linear.use_bias = True
    return linear

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "model.layers.{}"
    rules: Rules = {}
    for index, role in enumerate(("gate", "up")):
      fused = f"{at}.mlp.experts.gate_up_proj"
      rules[f"stack.{{}}.mlp.experts.{role}.w"] = Interleaved(fused, index=index)
      rules[f"stack.{{}}.mlp.experts.{role}.b"] = Interleaved(f"{fused}_bias", index=index)
    rules |= {
      "stack.{}.attention.sinks": Same(f"{at}.self_attn.sinks"),
      "stack.{}.mlp.router.w": Matrix(f"{at}.mlp.router.weight"),
      "stack.{}.mlp.router.b": Same(f"{at}.mlp.router.bias"),
      "stack.{}.mlp.experts.down.w": Same(f"{at}.mlp.experts.down_proj"),
      "stack.{}.mlp.experts.down.b": Same(f"{at}.mlp.experts.down_proj_bias"),
    }
    family = super().hugging_face()
    return family.variant(
      lacking=("attention_bias",),
      model_type="gpt_oss",
      architecture="GptOssForCausalLM",
      knobs={
        "intermediate_size": "EXPERT_DIMS",
        "num_local_experts": ("NUM_EXPERTS", 128),
        "num_experts_per_tok": ("NUM_EXPERTS_PER_TOKEN", 4),
        "router_aux_loss_coef": ("BALANCE_LOSS_WEIGHT", 0.001),
        "sliding_window": ("WINDOW", 128),
      },
      defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
      },
      fixed={"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
      neutral={"initial_context_length"},  # In the published configuration, but unused.
      equal={"experts_per_token": "num_experts_per_tok"},
      aliases={"num_experts": "num_local_experts"},
      layers=LayerPattern(("sliding_attention", "full_attention")),
      rope=HfRope(theta=150_000.0, fixed={"truncate": False}, absent=_YARN),
      rules=rules,
    )


@register
class GptOss20B(datasets.Synthetic, GptOss):
  """gpt-oss 20B. 20,914,757,184 parameters."""

  NUM_LAYERS = 24
  NUM_EXPERTS = 32


@register
class GptOss120B(datasets.Synthetic, GptOss):
  """gpt-oss 120B. 116,829,156,672 parameters."""

  NUM_LAYERS = 36
  NUM_EXPERTS = 128
