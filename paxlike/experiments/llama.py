# SPDX-License-Identifier: Apache-2.0
"""LLaMA 2 (Touvron et al., 2023) and Llama 3 (Grattafiori et al., 2024).

Pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases, untied embeddings. The
registered sizes train on synthetic tokens; other data need a mixin:
`class MyLlama(datasets.LocalText, Llama2_7B)`.
"""

import math
from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints import hf_keys
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Matrix, Same
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.experiments import datasets
from paxlike.registry import register


class Llama(Experiment):
  """The LLaMA family, and the base class of families derived from it."""

  NUM_KV_HEADS: ranges.Size | None = None  #: Number of KV heads. None: NUM_HEADS.
  ROPE_THETA: ranges.Base = 10_000.0  #: Base of the wavelengths of rotary positions.
  #: Scaling of rotary positions for longer contexts, if ROPE_FACTOR is set.
  ROPE_SCALING: Literal["linear", "llama3", "yarn"] = "linear"
  #: Divisor of rotary frequencies (llama3, yarn: of the low ones). None: no scaling.
  ROPE_FACTOR: ranges.Stretch | None = None
  #: Context length before scaling, for llama3 and yarn.
  ROPE_ORIGINAL_LENGTH: ranges.Size | None = None
  USE_ATTENTION_BIAS: bool = False  #: Biases in the linear maps of attention.
  NORM_EPSILON: ranges.Epsilon = 1e-5  #: Epsilon of RMSNorm.
  USE_TIED_EMBEDDING: bool = False  #: Use the embedding table as output projection.
  ICI_MESH_SHAPE = (1, -1, 1)
  PERCORE_BATCH_SIZE = 1
  MAX_STEPS = 100
  LEARNING_RATE = 3e-5
  LR_COS_WARMUP = 10
  CHECKPOINT_POLICY = "SAVE_NOTHING"

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    if not self.USE_TIED_EMBEDDING:
      model.head = self.linear("head")
    return model

  def norm(self) -> fdl.Partial:
    return fdl.Partial(layers.RmsNorm, epsilon=self.NORM_EPSILON)

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.num_kv_heads = self.NUM_KV_HEADS
    attention.rope = self.rope()
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    """Returns the rotary positions.

    Raises:
      UserError: ROPE_SCALING needs ROPE_ORIGINAL_LENGTH, which is None.
    """
    rope = fdl.Partial(layers.Rope, theta=self.ROPE_THETA)
    kind, factor, length = self.ROPE_SCALING, self.ROPE_FACTOR, self.ROPE_ORIGINAL_LENGTH
    if factor is None:
      return rope
    if kind == "linear":
      rope.scaling = fdl.Partial(layers.rope.linear, factor=factor)
      return rope
    if length is None:
      raise UserError(f"ROPE_SCALING={kind} needs ROPE_ORIGINAL_LENGTH.")
    if kind == "llama3":
      rope.scaling = fdl.Partial(layers.rope.llama3, factor=factor, original_length=length)
      return rope
    rope.scaling = fdl.Partial(
      layers.rope.yarn, theta=self.ROPE_THETA, factor=factor, original_length=length
    )
    rope.magnitude = self.yarn_magnitude()
    return rope

  def yarn_magnitude(self) -> float:
    """Returns the factor by which YaRN scales rotated queries and keys."""
    factor = self.ROPE_FACTOR
    return 1.0 if factor is None or factor <= 1 else 0.1 * math.log(factor) + 1

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    if self.USE_ATTENTION_BIAS and role in ("query", "key", "value", "output"):
      linear.use_bias = True
    return linear

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().mlp()
    mlp.gate = self.linear("gate")
    mlp.activation = layers.swiglu
    return mlp

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "model.layers.{}"
    return hugging_face.Family(
      model_type="llama",
      architecture="LlamaForCausalLM",
      knobs={
        "vocab_size": "VOCAB_SIZE",
        "max_position_embeddings": "MAX_SEQ_LEN",
        "num_hidden_layers": "NUM_LAYERS",
        "hidden_size": "MODEL_DIMS",
        "intermediate_size": "HIDDEN_DIMS",
        "num_attention_heads": "NUM_HEADS",
        "num_key_value_heads": ("NUM_KV_HEADS", None),
        "head_dim": ("DIMS_PER_HEAD", None),
        "rms_norm_eps": ("NORM_EPSILON", 1e-6),
        "tie_word_embeddings": ("USE_TIED_EMBEDDING", False),
        "attention_bias": ("USE_ATTENTION_BIAS", False),
      },
      nullable=frozenset({"num_key_value_heads", "head_dim"}),
      fixed={"hidden_act": hf_keys.SILU, "mlp_bias": False},
      rope=HfRope(),
      rules={
        "embedding.table": Same("model.embed_tokens.weight"),
        "stack.{}.attention_norm.scale": Same(f"{at}.input_layernorm.weight"),
        "stack.{}.attention.query.w": Matrix(f"{at}.self_attn.q_proj.weight"),
        "stack.{}.attention.key.w": Matrix(f"{at}.self_attn.k_proj.weight"),
        "stack.{}.attention.value.w": Matrix(f"{at}.self_attn.v_proj.weight"),
        "stack.{}.attention.output.w": Matrix(f"{at}.self_attn.o_proj.weight", inputs=2),
        "stack.{}.attention.query.b": Same(f"{at}.self_attn.q_proj.bias", ndim=1),
        "stack.{}.attention.key.b": Same(f"{at}.self_attn.k_proj.bias", ndim=1),
        "stack.{}.attention.value.b": Same(f"{at}.self_attn.v_proj.bias", ndim=1),
        "stack.{}.attention.output.b": Same(f"{at}.self_attn.o_proj.bias", ndim=1),
        "stack.{}.attention.query_norm.scale": Same(f"{at}.self_attn.q_norm.weight"),
        "stack.{}.attention.key_norm.scale": Same(f"{at}.self_attn.k_norm.weight"),
        "stack.{}.mlp_norm.scale": Same(f"{at}.post_attention_layernorm.weight"),
        "stack.{}.mlp.gate.w": Matrix(f"{at}.mlp.gate_proj.weight"),
        "stack.{}.mlp.up.w": Matrix(f"{at}.mlp.up_proj.weight"),
        "stack.{}.mlp.down.w": Matrix(f"{at}.mlp.down_proj.weight"),
        "norm.scale": Same("model.norm.weight"),
        "head.w": Matrix("lm_head.weight"),
      },
      copies={"lm_head.weight": "model.embed_tokens.weight"},
    )


class Llama2_7B(Llama):
  """LLaMA 2 7B, with Pax's optimizer settings."""

  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 4096
  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 11008
  NUM_HEADS = 32
  ADAM_BETA2 = 0.99
  ADAM_EPSILON = 1e-6
  WEIGHT_DECAY = 1e-3
  CLIP_GRADIENT_NORM_TO_VALUE = 5.0


class Llama2_13B(Llama2_7B):
  """LLaMA 2 13B."""

  NUM_LAYERS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 13824
  NUM_HEADS = 40


class Llama2_70B(Llama2_7B):
  """LLaMA 2 70B."""

  NUM_LAYERS = 80
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 28672
  NUM_HEADS = 64
  NUM_KV_HEADS = 8


@register
class LLaMA7B(datasets.BoolQ, Llama2_7B):
  """LLaMA 2 7B on BoolQ. Published: zero-shot 77.52 % on 8 H100; SFT 88.7 %, LoRA 88.9 % on 16."""

  PERCORE_BATCH_SIZE = 16
  MAX_STEPS = 0


@register
class LLaMA13B(datasets.BoolQ, Llama2_13B):
  """LLaMA 2 13B on BoolQ. Published on 8 H100, FSDP: zero-shot 82.99 %."""

  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 0


@register
class LLaMA70B(datasets.BoolQ, Llama2_70B):
  """LLaMA 2 70B on BoolQ. Published on 16 H100, FSDP: zero-shot 85.08 %."""

  PERCORE_BATCH_SIZE = 4
  MAX_STEPS = 0


@register
class SyntheticLLaMA7B(datasets.Synthetic, Llama2_7B):
  """LLaMA 2 7B on synthetic tokens. 6,738,415,616 parameters."""


@register
class SyntheticLLaMA13B(datasets.Synthetic, Llama2_13B):
  """LLaMA 2 13B on synthetic tokens. 13,015,864,320 parameters."""


@register
class SyntheticLLaMA70B(datasets.Synthetic, Llama2_70B):
  """LLaMA 2 70B on synthetic tokens. 68,976,648,192 parameters."""


@register
class Llama3_8B(datasets.Synthetic, Llama):
  """Llama 3 8B. 8,030,261,248 parameters."""

  VOCAB_SIZE = 128256
  MAX_SEQ_LEN = 8192
  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  ROPE_THETA = 500_000.0


@register
class Llama3_70B(Llama3_8B):
  """Llama 3 70B. 70,553,706,496 parameters."""

  NUM_LAYERS = 80
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 28672
  NUM_HEADS = 64


class Llama31(Llama):
  """Llama 3.1: rotary positions scaled for contexts of 131,072 tokens."""

  ROPE_SCALING = "llama3"
  ROPE_FACTOR = 8.0
  ROPE_ORIGINAL_LENGTH = 8192


@register
class Llama31_8B(Llama31, Llama3_8B):
  """Llama 3.1 8B. 8,030,261,248 parameters."""


@register
class Llama31_70B(Llama31, Llama3_70B):
  """Llama 3.1 70B. 70,553,706,496 parameters."""


@register
class Llama31_405B(Llama31, Llama3_8B):
  """Llama 3.1 405B. 405,853,388,800 parameters."""

  NUM_LAYERS = 126
  MODEL_DIMS = 16384
  HIDDEN_DIMS = 53248
  NUM_HEADS = 128
