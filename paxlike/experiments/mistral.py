# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B (Jiang et al., 2023), Mixtral (Jiang et al., 2024), and Mistral AI's later models.

Mistral 7B is LLaMA with sliding-window attention; Mistral Nemo and Mistral Small have full
attention. Mixtral has eight experts per layer, two per token. Ministral 3 (Liu et al., 2026) has
YaRN, and logits that grow with the position of the query.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Matrix, PerExpert
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.moe import Moe
from paxlike.registry import register

# Text models of Mistral Small 3.1 and Ministral 3 are published with a vision tower.
_WITH_IMAGES = hugging_face.Wrapper(
  model_type="mistral3",
  neutral=frozenset(
    {"vision_config", "image_token_index", "image_token_id", "projector_hidden_act"}
    | {"multimodal_projector_bias", "spatial_merge_size", "vision_feature_layer"}
  ),
  # As published, and as transformers saves it since 4.52.
  renamed={"language_model.": "", "model.language_model.": "model."},
  dropped=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
  tied=None,
)


class Mistral(Llama):
  """The Mistral family."""

  #: Attention window in tokens, including the current one. None: full attention.
  WINDOW: ranges.Positive | None = 4096

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.window = self.WINDOW
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("attention_bias",),
      model_type="mistral",
      architecture="MistralForCausalLM",
      knobs={"sliding_window": ("WINDOW", 4096)},
      defaults={"num_key_value_heads": 8},
      nullable={"sliding_window"},
      wrapper=_WITH_IMAGES,
    )


@register
class Mistral7B(datasets.Synthetic, Mistral):
  """Mistral 7B v0.1. 7,241,732,096 parameters."""

  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 8192
  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  NUM_HEADS = 32
  NUM_KV_HEADS = 8


@register
class MistralNemo12B(datasets.Synthetic, Mistral):
  """Mistral Nemo 12B. 12,247,782,400 parameters."""

  VOCAB_SIZE = 131_072
  MAX_SEQ_LEN = 131_072
  NUM_LAYERS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 14_336
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  DIMS_PER_HEAD = 128
  ROPE_THETA = 1_000_000.0
  WINDOW = None


@register
class MistralSmall3_24B(MistralNemo12B):
  """Mistral Small 3 24B. 23,572,403,200 parameters."""

  MAX_SEQ_LEN = 32_768
  HIDDEN_DIMS = 32_768
  ROPE_THETA = 100_000_000.0


@register
class MistralSmall31_24B(MistralSmall3_24B):
  """Mistral Small 3.1 and 3.2 24B without their vision tower. 23,572,403,200 parameters."""

  MAX_SEQ_LEN = 131_072
  ROPE_THETA = 1_000_000_000.0


# Rotary positions of configurations that do not specify them.
_YARN = {
  "rope_type": "yarn",
  "rope_theta": 1_000_000.0,
  "factor": 16.0,
  "original_max_position_embeddings": 16_384,
  "mscale": 1.0,
  "mscale_all_dim": 1.0,
  "llama_4_scaling_beta": 0.1,
}


class Ministral3(Mistral):
  """The Ministral 3 family."""

  VOCAB_SIZE = 131_072
  MAX_SEQ_LEN = 262_144
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  DIMS_PER_HEAD = 128
  WINDOW = None
  ROPE_THETA = 1_000_000.0
  ROPE_SCALING = "yarn"
  ROPE_FACTOR = 16.0
  ROPE_ORIGINAL_LENGTH = 16_384
  #: Growth of attention logits with the logarithm of the position of the query, beyond
  #: ROPE_ORIGINAL_LENGTH (Llama 4).
  POSITION_SCALE_BETA: ranges.NonNegativeFloat = 0.1

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    if (length := self.ROPE_ORIGINAL_LENGTH) is None:
      raise UserError("POSITION_SCALE_BETA needs ROPE_ORIGINAL_LENGTH.")
    attention.query_scale = fdl.Partial(
      layers.long_context_scale, strength=self.POSITION_SCALE_BETA, floor=length
    )
    return attention

  def yarn_magnitude(self) -> float:
    return 1.0

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      model_type="ministral3",
      architecture="Ministral3ForCausalLM",
      defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
      rope=HfRope(
        theta=1_000_000.0,
        types=("yarn",),
        fixed={"mscale": 1.0, "mscale_all_dim": 1.0},
        absent=_YARN,
        knobs={"llama_4_scaling_beta": "POSITION_SCALE_BETA"},
        neutral=frozenset({"max_position_embeddings"}),
      ),
    )


@register
class Ministral3_3B(datasets.Synthetic, Ministral3):
  """Ministral 3 3B without its vision tower. 3,429,006,336 parameters."""

  NUM_LAYERS = 26
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 9216
  USE_TIED_EMBEDDING = True


@register
class Ministral3_8B(datasets.Synthetic, Ministral3):
  """Ministral 3 8B without its vision tower. 8,489,553,920 parameters."""

  NUM_LAYERS = 34
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14_336


@register
class Ministral3_14B(datasets.Synthetic, Ministral3):
  """Ministral 3 14B without its vision tower. 13,506,073,600 parameters."""

  NUM_LAYERS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 16_384
  ROPE_THETA = 1_000_000_000.0


class Mixtral(Moe, Mistral):
  """Mixtral: Mistral with experts and full attention."""

  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 32768
  NUM_KV_HEADS = 8
  ROPE_THETA = 1_000_000.0
  WINDOW = None

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "model.layers.{}.block_sparse_moe"
    family = super().hugging_face()
    return family.variant(
      model_type="mixtral",
      architecture="MixtralForCausalLM",
      knobs={
        "intermediate_size": "EXPERT_DIMS",
        "num_local_experts": ("NUM_EXPERTS", 8),
        "num_experts_per_tok": ("NUM_EXPERTS_PER_TOKEN", 2),
        "router_aux_loss_coef": ("BALANCE_LOSS_WEIGHT", 0.001),
      },
      defaults={
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
      },
      neutral={"router_jitter_noise"},  # For training only.
      aliases={"num_experts": "num_local_experts"},
      rope=HfRope(theta=1_000_000.0),
      wrapper=None,
      rules={
        "stack.{}.mlp.router.w": Matrix(f"{at}.gate.weight"),
        "stack.{}.mlp.experts.gate.w": PerExpert(f"{at}.experts.{{expert}}.w1.weight"),
        "stack.{}.mlp.experts.up.w": PerExpert(f"{at}.experts.{{expert}}.w3.weight"),
        "stack.{}.mlp.experts.down.w": PerExpert(f"{at}.experts.{{expert}}.w2.weight"),
      },
    )


@register
class Mixtral8x7B(datasets.Synthetic, Mixtral):
  """Mixtral 8x7B. 46,702,792,704 parameters, 12,879,925,248 of them active per token."""

  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  NUM_HEADS = 32


@register
class Mixtral8x22B(datasets.Synthetic, Mixtral):
  """Mixtral 8x22B. 140,620,634,112 parameters."""

  MAX_SEQ_LEN = 65536
  NUM_LAYERS = 56
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 16384
  NUM_HEADS = 48
