# SPDX-License-Identifier: Apache-2.0
"""Phi-3 (Abdin et al., 2024) and Phi-4 (2024): LLaMA; Phi-4-mini rotates a share of each head.

Models with a context of 131,072 tokens have LongRoPE: a set of factors for documents of up to
ROPE_ORIGINAL_LENGTH tokens, and another for longer documents.
"""

from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfLongRope
from paxlike.checkpoints.hf_rules import Matrix, stacked
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class Phi3(Llama):
  """The Phi-3 family, to which Phi-4 belongs, too."""

  VOCAB_SIZE = 32_064
  MAX_SEQ_LEN = 4096
  #: Attention window in tokens, including the current one. None: full attention.
  WINDOW: ranges.Positive | None = None
  ROPE_SHARE: ranges.Share = 1.0  #: Share of a head's dims that is rotated, the first ones.
  #: Scaling of rotary positions for longer contexts, if ROPE_FACTOR is set.
  ROPE_SCALING: Literal["longrope"] = "longrope"
  #: Divisors of the rotary frequencies in documents of up to ROPE_ORIGINAL_LENGTH tokens.
  ROPE_SHORT_FACTORS: tuple[ranges.PositiveFloat, ...] = ()
  ROPE_LONG_FACTORS: tuple[ranges.PositiveFloat, ...] = ()  #: The same in longer documents.

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.window = self.WINDOW
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    share = self.ROPE_SHARE
    kind, factor, length = self.ROPE_SCALING, self.ROPE_FACTOR, self.ROPE_ORIGINAL_LENGTH
    short, long = self.ROPE_SHORT_FACTORS, self.ROPE_LONG_FACTORS
    if factor is None:
      return fdl.Partial(layers.Rope, theta=self.ROPE_THETA, share=share)
    if length is None:
      raise UserError(f"ROPE_SCALING={kind} needs ROPE_ORIGINAL_LENGTH.")
    return fdl.Partial(
      layers.LongRope,
      theta=self.ROPE_THETA,
      share=share,
      short_factors=tuple(short),
      long_factors=tuple(long),
      original_length=length,
      magnitude=layers.rope.longrope_magnitude(factor, length),
    )

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at, of = "model.layers.{}", "stack.{}.attention"
    qkv = {f"{of}.{role}.w": Matrix("") for role in ("query", "key", "value")}
    gate_up = {f"stack.{{}}.mlp.{role}.w": Matrix("") for role in ("gate", "up")}
    family = super().hugging_face()
    return family.variant(
      lacking=("attention_bias", "mlp_bias", "stack.*.b"),
      model_type="phi3",
      architecture="Phi3ForCausalLM",
      knobs={"sliding_window": ("WINDOW", None)},
      defaults={"rms_norm_eps": 1e-5},
      nullable={"sliding_window"},
      neutral={"embd_pdrop", "resid_pdrop"}  # For training only.
      | {"full_attn_mod", "interpolate_factor", "lm_head_bias"},  # Unused.
      rope=HfLongRope(),
      rules={
        **stacked(f"{at}.self_attn.qkv_proj.weight", qkv),
        **stacked(f"{at}.mlp.gate_up_proj.weight", gate_up),
      },
    )


@register
class Phi3Mini(datasets.Synthetic, Phi3):
  """Phi-3-mini with a context of 4,096 tokens. 3,821,079,552 parameters."""

  NUM_LAYERS = 32
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 8192
  NUM_HEADS = 32
  WINDOW = 2047


@register
class Phi4Mini(datasets.Synthetic, Phi3):
  """Phi-4-mini. 3,836,021,760 parameters."""

  VOCAB_SIZE = 200_064
  MAX_SEQ_LEN = 131_072
  NUM_LAYERS = 32
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 8192
  NUM_HEADS = 24
  NUM_KV_HEADS = 8
  WINDOW = 262_144
  USE_TIED_EMBEDDING = True
  ROPE_SHARE = 0.75
  ROPE_FACTOR = 32.0
  ROPE_ORIGINAL_LENGTH = 4096
  ROPE_SHORT_FACTORS = (1.0,) * 48
  # fmt: off
  ROPE_LONG_FACTORS = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
  )
  # fmt: on


@register
class Phi4(datasets.Synthetic, Phi3):
  """Phi-4 14B. 14,659,507,200 parameters."""

  VOCAB_SIZE = 100_352
  MAX_SEQ_LEN = 16_384
  NUM_LAYERS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 17_920
  NUM_HEADS = 40
  NUM_KV_HEADS = 10
  ROPE_THETA = 250_000.0
