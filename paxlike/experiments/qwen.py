# SPDX-License-Identifier: Apache-2.0
"""Qwen3 (Yang et al., 2025): LLaMA with QK-norm; the larger models have experts."""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rules import Matrix, PerExpert
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.moe import Moe
from paxlike.registry import register


class Qwen3(Llama):
  """The Qwen3 family."""

  VOCAB_SIZE = 151_936
  MAX_SEQ_LEN = 32768
  DIMS_PER_HEAD = 128
  NUM_KV_HEADS = 8
  NORM_EPSILON = 1e-6
  ROPE_THETA = 1_000_000.0

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.qk_norm = self.norm()
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      model_type="qwen3",
      architecture="Qwen3ForCausalLM",
      defaults={"num_key_value_heads": 32, "head_dim": 128},
      neutral={"sliding_window", "max_window_layers"},  # There is no window.
      fixed={"use_sliding_window": False},
      layers=LayerPattern(("full_attention",)),
    )


@register
class Qwen3_0_6B(datasets.Synthetic, Qwen3):
  """Qwen3 0.6B. 596,049,920 parameters."""

  NUM_LAYERS = 28
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 3072
  NUM_HEADS = 16
  USE_TIED_EMBEDDING = True


@register
class Qwen3_1_7B(Qwen3_0_6B):
  """Qwen3 1.7B. 1,720,574,976 parameters."""

  MODEL_DIMS = 2048
  HIDDEN_DIMS = 6144


@register
class Qwen3_4B(Qwen3_0_6B):
  """Qwen3 4B. 4,022,468,096 parameters."""

  NUM_LAYERS = 36
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 9728
  NUM_HEADS = 32


@register
class Qwen3_8B(datasets.Synthetic, Qwen3):
  """Qwen3 8B. 8,190,735,360 parameters."""

  NUM_LAYERS = 36
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12288
  NUM_HEADS = 32


@register
class Qwen3_14B(Qwen3_8B):
  """Qwen3 14B. 14,768,307,200 parameters."""

  NUM_LAYERS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17408
  NUM_HEADS = 40


@register
class Qwen3_32B(Qwen3_8B):
  """Qwen3 32B. 32,762,123,264 parameters."""

  NUM_LAYERS = 64
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 25600
  NUM_HEADS = 64


class Qwen3Moe(Moe, Qwen3):
  """Qwen3 with experts: 128 per layer, eight per token."""

  NUM_KV_HEADS = 4
  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 8
  BALANCE_LOSS_WEIGHT = 0.001

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "model.layers.{}.mlp"
    family = super().hugging_face()
    return family.variant(
      model_type="qwen3_moe",
      architecture="Qwen3MoeForCausalLM",
      knobs={
        "moe_intermediate_size": ("EXPERT_DIMS", 768),
        "num_experts": ("NUM_EXPERTS", 128),
        "num_experts_per_tok": ("NUM_EXPERTS_PER_TOKEN", 8),
        "router_aux_loss_coef": ("BALANCE_LOSS_WEIGHT", 0.001),
      },
      defaults={
        "num_key_value_heads": 4,
        "head_dim": None,
        "norm_topk_prob": False,
      },
      fixed={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ([], None)},
      aliases={"num_local_experts": "num_experts"},
      layers=None,
      rules={
        "stack.{}.mlp.router.w": Matrix(f"{at}.gate.weight"),
        "stack.{}.mlp.experts.gate.w": PerExpert(f"{at}.experts.{{expert}}.gate_proj.weight"),
        "stack.{}.mlp.experts.up.w": PerExpert(f"{at}.experts.{{expert}}.up_proj.weight"),
        "stack.{}.mlp.experts.down.w": PerExpert(f"{at}.experts.{{expert}}.down_proj.weight"),
      },
    )


@register
class Qwen3_30B_A3B(datasets.Synthetic, Qwen3Moe):
  """Qwen3 30B-A3B. 30,532,122,624 parameters."""

  NUM_LAYERS = 48
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 6144
  EXPERT_DIMS = 768
  NUM_HEADS = 32


@register
class Qwen3_235B_A22B(datasets.Synthetic, Qwen3Moe):
  """Qwen3 235B-A22B. 235,093,634,560 parameters."""

  NUM_LAYERS = 94
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12288
  EXPERT_DIMS = 1536
  NUM_HEADS = 64
