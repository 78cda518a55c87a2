# SPDX-License-Identifier: Apache-2.0
"""Gemma (2024), Gemma 2 (2024) and the text models of Gemma 3 (2025), by the Gemma Team.

LLaMA with heads of 256, GeGLU, tied and scaled embeddings, and norms whose scale is stored minus 1.
Gemma 2 alternates sliding-window and full attention, normalizes the outputs of attention and MLP,
and soft-caps logits. Gemma 3 has QK-norm instead of soft caps, and five windows per full layer.
"""

import math

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints import hf_keys
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Same
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class Gemma(Llama):
  """The Gemma family."""

  VOCAB_SIZE = 256_000
  MAX_SEQ_LEN = 8192
  DIMS_PER_HEAD = 256
  NORM_EPSILON = 1e-6
  USE_TIED_EMBEDDING = True

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.embedding.scale = math.sqrt(self.MODEL_DIMS)
    return model

  def norm(self) -> fdl.Partial:
    return fdl.Partial(layers.RmsNorm, epsilon=self.NORM_EPSILON, offset=1.0)

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().mlp()
    mlp.activation = layers.geglu
    return mlp

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("mlp_bias",),
      model_type="gemma",
      architecture="GemmaForCausalLM",
      defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
      # Versions of transformers differ in which of the two they read.
      fixed={
        "hidden_act": hf_keys.GELU_TANH,
        "hidden_activation": (*hf_keys.GELU_TANH, None),
      },
    )


@register
class Gemma2B(datasets.Synthetic, Gemma):
  """Gemma 2B. 2,506,172,416 parameters."""

  NUM_LAYERS = 18
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 16384
  NUM_HEADS = 8
  NUM_KV_HEADS = 1


@register
class Gemma7B(datasets.Synthetic, Gemma):
  """Gemma 7B. 8,537,680,896 parameters."""

  NUM_LAYERS = 28
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 24576
  NUM_HEADS = 16


class Gemma2(Gemma):
  """Gemma 2: local and global layers alternate."""

  WINDOW: ranges.Positive = 4096  #: Attention window of local layers, including the current token.
  #: Attention logits are divided by its square root. None: DIMS_PER_HEAD.
  QUERY_SCALE_DIMS: ranges.Size | None = None
  ATTENTION_SOFT_CAP: ranges.Cap | None = 50.0  #: Soft cap of attention logits.
  LOGITS_SOFT_CAP: ranges.Cap | None = 30.0  #: Soft cap of output logits.

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.soft_cap = self.LOGITS_SOFT_CAP
    return model

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    return [self.local_block(), self.block()]

  def block(self) -> fdl.Partial[layers.Block]:
    block = super().block()
    block.post_norm = self.norm()
    return block

  def local_block(self) -> fdl.Partial[layers.Block]:
    """Returns a layer with sliding-window attention."""
    block = self.block()
    block.attention.window = self.WINDOW
    return block

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.soft_cap = self.ATTENTION_SOFT_CAP
    attention.scale = 1 / math.sqrt(self.QUERY_SCALE_DIMS or self.head_dim())
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "model.layers.{}"
    family = super().hugging_face()
    return family.variant(
      model_type="gemma2",
      architecture="Gemma2ForCausalLM",
      knobs={
        "sliding_window": ("WINDOW", 4096),
        "query_pre_attn_scalar": ("QUERY_SCALE_DIMS", 256),
        "attn_logit_softcapping": ("ATTENTION_SOFT_CAP", 50.0),
        "final_logit_softcapping": ("LOGITS_SOFT_CAP", 30.0),
      },
      defaults={
        "num_key_value_heads": 4,
      },
      nullable={"attn_logit_softcapping", "final_logit_softcapping"},
      fixed={"hidden_activation": hf_keys.GELU_TANH},
      layers=LayerPattern(("sliding_attention", "full_attention")),
      rules={
        "stack.{}.attention_post_norm.scale": Same(f"{at}.post_attention_layernorm.weight"),
        "stack.{}.mlp_norm.scale": Same(f"{at}.pre_feedforward_layernorm.weight"),
        "stack.{}.mlp_post_norm.scale": Same(f"{at}.post_feedforward_layernorm.weight"),
      },
    )


@register
class Gemma2_2B(datasets.Synthetic, Gemma2):
  """Gemma 2 2B. 2,614,341,888 parameters."""

  NUM_LAYERS = 26
  MODEL_DIMS = 2304
  HIDDEN_DIMS = 9216
  NUM_HEADS = 8
  NUM_KV_HEADS = 4


@register
class Gemma2_9B(datasets.Synthetic, Gemma2):
  """Gemma 2 9B. 9,241,705,984 parameters."""

  NUM_LAYERS = 42
  MODEL_DIMS = 3584
  HIDDEN_DIMS = 14336
  NUM_HEADS = 16
  NUM_KV_HEADS = 8


@register
class Gemma2_27B(datasets.Synthetic, Gemma2):
  """Gemma 2 27B. 27,227,128,320 parameters."""

  NUM_LAYERS = 46
  MODEL_DIMS = 4608
  HIDDEN_DIMS = 36864
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  DIMS_PER_HEAD = 128
  QUERY_SCALE_DIMS = 144


# Keys that the configurations of Gemma 3 4B to 27B omit.
_GEMMA3_SIZES = {
  "vocab_size": 262_208,
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 26,
  "num_attention_heads": 8,
  "max_position_embeddings": 131_072,
}
_GEMMA3_WITH_IMAGES = hugging_face.Wrapper(
  model_type="gemma3",
  neutral=frozenset(
    {"vision_config", "mm_tokens_per_image", "image_token_index", "image_token_id"}
    | {"boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"}
  ),
  fixed={"final_logit_softcapping": None},
  # As published, and as transformers saves it since 4.52.
  renamed={"language_model.": "", "model.language_model.": "model."},
  dropped=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)


class Gemma3(Gemma2):
  """Text models of Gemma 3: five local layers per global layer."""

  VOCAB_SIZE = 262_144
  ROPE_THETA = 1_000_000.0
  LOCAL_ROPE_THETA: ranges.Base = 10_000.0  #: ROPE_THETA of local layers.
  ATTENTION_SOFT_CAP = None
  LOGITS_SOFT_CAP = None

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    return [*(self.local_block() for _ in range(5)), self.block()]

  def local_block(self) -> fdl.Partial[layers.Block]:
    block = super().local_block()
    block.attention.rope = fdl.Partial(layers.Rope, theta=self.LOCAL_ROPE_THETA)
    return block

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.qk_norm = self.norm()
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("attn_logit_softcapping",),
      model_type="gemma3_text",
      architecture="Gemma3ForCausalLM",
      defaults={**_GEMMA3_SIZES, "final_logit_softcapping": None},
      fixed={"attn_logit_softcapping": None},
      layers=LayerPattern((*["sliding_attention"] * 5, "full_attention")),
      rope=HfRope(theta=1_000_000.0, local_theta=10_000.0),
      wrapper=_GEMMA3_WITH_IMAGES,
    )


@register
class Gemma3_270M(datasets.Synthetic, Gemma3):
  """Gemma 3 270M. 268,098,176 parameters."""

  NUM_LAYERS = 18
  MODEL_DIMS = 640
  HIDDEN_DIMS = 2048
  NUM_HEADS = 4
  NUM_KV_HEADS = 1
  WINDOW = 512


@register
class Gemma3_1B(datasets.Synthetic, Gemma3):
  """Gemma 3 1B. 999,885,952 parameters."""

  NUM_LAYERS = 26
  MODEL_DIMS = 1152
  HIDDEN_DIMS = 6912
  NUM_HEADS = 4
  NUM_KV_HEADS = 1
  WINDOW = 512


@register
class Gemma3_4B(datasets.Synthetic, Gemma3):
  """Gemma 3 4B without its vision tower. 3,880,263,168 parameters."""

  VOCAB_SIZE = 262_208
  NUM_LAYERS = 34
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10240
  NUM_HEADS = 8
  NUM_KV_HEADS = 4
  WINDOW = 1024
  ROPE_FACTOR = 8.0


@register
class Gemma3_12B(Gemma3_4B):
  """Gemma 3 12B without its vision tower. 11,766,034,176 parameters."""

  NUM_LAYERS = 48
  MODEL_DIMS = 3840
  HIDDEN_DIMS = 15360
  NUM_HEADS = 16
  NUM_KV_HEADS = 8


@register
class Gemma3_27B(Gemma3_4B):
  """Gemma 3 27B without its vision tower. 27,009,346,304 parameters."""

  NUM_LAYERS = 62
  MODEL_DIMS = 5376
  HIDDEN_DIMS = 21504
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  DIMS_PER_HEAD = 128
  QUERY_SCALE_DIMS = 168
