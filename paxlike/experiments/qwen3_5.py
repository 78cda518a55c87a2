# SPDX-License-Identifier: Apache-2.0
"""Text models of Qwen3.5 (Qwen team, 2026): Qwen3-Next without experts, or with fewer."""

import dataclasses

from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rules import Matrix, stacked
from paxlike.experiments import datasets
from paxlike.experiments.qwen import Qwen3, Qwen3Moe
from paxlike.experiments.qwen3_next import (
  GatedSharedExpert,
  QwenHybrid,
  hybrid_family,
  with_shared_expert,
)
from paxlike.registry import register

_AT = "model.layers.{}.linear_attn"
_OURS = "stack.{}.attention"
_ROLES = ("query", "key", "value")
_PROJECTIONS = {
  **stacked(f"{_AT}.in_proj_qkv.weight", {f"{_OURS}.{role}.w": Matrix("") for role in _ROLES}),
  f"{_OURS}.output_gate.w": Matrix(f"{_AT}.in_proj_z.weight"),
  f"{_OURS}.beta.w": Matrix(f"{_AT}.in_proj_b.weight"),
  f"{_OURS}.decay.w": Matrix(f"{_AT}.in_proj_a.weight"),
}
# In published configurations, of what transformers does not read.
_FIXED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": ([], None)}
_MTP = {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}
_WITH_IMAGES = hugging_face.Wrapper(
  model_type="qwen3_5",
  neutral=frozenset(
    {"vision_config", "image_token_id", "video_token_id"}
    | {"vision_start_token_id", "vision_end_token_id", "language_model_only"}
  ),
  renamed={"model.language_model.": "model."},
  dropped=r"model\.visual\..*",
  tied=False,
)


class Qwen35(QwenHybrid):
  """Text models of Qwen3.5 without experts."""

  VOCAB_SIZE = 248_320
  NUM_KV_HEADS = 4

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = hybrid_family(Qwen3.hugging_face(), num_kv_heads=4, projections=_PROJECTIONS)
    return family.variant(
      model_type="qwen3_5_text",
      architecture="Qwen3_5ForCausalLM",
      fixed=_FIXED,
      neutral=_MTP,
      wrapper=_WITH_IMAGES,
    )


class Qwen35Moe(GatedSharedExpert, QwenHybrid):
  """Text models of Qwen3.5 with experts."""

  VOCAB_SIZE = 248_320
  NUM_KV_HEADS = 2
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  EXPERT_DIMS = 512
  BALANCE_LOSS_WEIGHT = 0.001

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    moe = Qwen3Moe.hugging_face()
    family = hybrid_family(moe, num_kv_heads=2, projections=_PROJECTIONS)
    return with_shared_expert(family).variant(
      lacking=("intermediate_size",),
      model_type="qwen3_5_moe_text",
      architecture="Qwen3_5MoeForCausalLM",
      defaults={
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
      },
      fixed=_FIXED,
      neutral=_MTP | {"intermediate_size"},
      wrapper=dataclasses.replace(_WITH_IMAGES, model_type="qwen3_5_moe"),
      stacked_experts={
        "experts.gate_up_proj": ("gate_proj", "up_proj"),
        "experts.down_proj": ("down_proj",),
      },
    )


@register
class Qwen35_0_8B(datasets.Synthetic, Qwen35):
  """Qwen3.5 0.8B without its vision tower. 752,393,024 parameters."""

  NUM_LAYERS = 24
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 3584
  NUM_HEADS = 8
  NUM_KV_HEADS = 2
  LINEAR_NUM_VALUE_HEADS = 16
  USE_TIED_EMBEDDING = True


@register
class Qwen35_2B(Qwen35_0_8B):
  """Qwen3.5 2B without its vision tower. 1,881,825,088 parameters."""

  MODEL_DIMS = 2048
  HIDDEN_DIMS = 6144


@register
class Qwen35_4B(datasets.Synthetic, Qwen35):
  """Qwen3.5 4B without its vision tower. 4,205,751,296 parameters."""

  NUM_LAYERS = 32
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 9216
  NUM_HEADS = 16
  USE_TIED_EMBEDDING = True


@register
class Qwen35_9B(datasets.Synthetic, Qwen35):
  """Qwen3.5 9B without its vision tower. 8,953,803,264 parameters."""

  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12_288
  NUM_HEADS = 16


@register
class Qwen35_27B(datasets.Synthetic, Qwen35):
  """Qwen3.5 27B without its vision tower. 26,895,998,464 parameters."""

  NUM_LAYERS = 64
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17_408
  NUM_HEADS = 24
  LINEAR_NUM_VALUE_HEADS = 48


@register
class Qwen35_35B_A3B(datasets.Synthetic, Qwen35Moe):
  """Qwen3.5 35B-A3B without its vision tower. 34,660,610,688 parameters."""

  NUM_LAYERS = 40
  MODEL_DIMS = 2048
  NUM_HEADS = 16


@register
class Qwen35_122B_A10B(datasets.Synthetic, Qwen35Moe):
  """Qwen3.5 122B-A10B without its vision tower. 122,111,526,912 parameters."""

  NUM_LAYERS = 48
  MODEL_DIMS = 3072
  EXPERT_DIMS = 1024
  SHARED_EXPERT_DIMS = 1024
  NUM_HEADS = 32
  LINEAR_NUM_VALUE_HEADS = 64


@register
class Qwen35_397B_A17B(datasets.Synthetic, Qwen35Moe):
  """Qwen3.5 397B-A17B without its vision tower. 396,346,350,336 parameters."""

  NUM_LAYERS = 60
  MODEL_DIMS = 4096
  NUM_EXPERTS = 512
  NUM_EXPERTS_PER_TOKEN = 10
  EXPERT_DIMS = 1024
  SHARED_EXPERT_DIMS = 1024
  NUM_HEADS = 32
  LINEAR_NUM_VALUE_HEADS = 64
