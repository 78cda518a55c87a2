# SPDX-License-Identifier: Apache-2.0
"""The text models of Llama 4 (Meta, 2025): Scout and Maverick.

Of every four layers, three have rotary positions and attend within chunks of the context; the
fourth has neither, and scales queries at long positions instead. Scout normalizes queries and keys
of rotary layers, by norms without weights. A token has one expert, whose input is weighted by the
sigmoid of the router's logit, beside a shared expert. In Maverick, every other layer has experts.
"""

import math
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Fused, Matrix, Rules, Same
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.moe import Moe
from paxlike.registry import register

_WITH_IMAGES = hugging_face.Wrapper(
  model_type="llama4",
  neutral=frozenset(
    {"vision_config", "image_token_index", "image_token_id"}
    | {"boi_token_index", "boi_token_id", "eoi_token_index", "eoi_token_id"}
  ),
  renamed={"language_model.": ""},
  dropped=r"(vision_model|multi_modal_projector)\..*",
  tied=False,
)


class Llama4(Moe, Llama):
  """The Llama 4 family. HIDDEN_DIMS is the width of layers without experts."""

  VOCAB_SIZE = 202_048
  MAX_SEQ_LEN = 262_144
  DIMS_PER_HEAD = 128
  NUM_EXPERTS_PER_TOKEN = 1
  BALANCE_LOSS_WEIGHT = 0.001
  EXPERT_EVERY: ranges.Positive = 1  #: One layer in this many, the last of them, has experts.
  #: One layer in this many, the last of them, has no rotary positions, and full attention.
  GLOBAL_EVERY: ranges.Positive = 4
  #: Chunk of positions within which the other layers attend. None: full attention.
  ATTENTION_CHUNK: ranges.Positive | None = 8192
  USE_UNSCALED_QK_NORM: bool = True  #: Norms of queries and keys of layers with rotary positions.
  #: Scale the queries of layers without rotary positions, at long positions.
  USE_LONG_CONTEXT_SCALE: bool = True
  LONG_CONTEXT_FLOOR: ranges.Size = 8192  #: Positions per step of that scale.
  LONG_CONTEXT_STRENGTH: ranges.Finite = 0.1  #: Factor of the logarithm of the steps.
  ROPE_THETA = 500_000.0
  ROPE_SCALING = "llama3"
  ROPE_ORIGINAL_LENGTH = 8192
  #: Rotations within the original context from which llama3 leaves a frequency (high_freq_factor).
  ROPE_HIGH: ranges.PositiveFloat = 4.0

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    count = math.lcm(self.EXPERT_EVERY, self.GLOBAL_EVERY)
    if count > ranges.MOST_LAYERS:
      raise UserError(
        f"EXPERT_EVERY={self.EXPERT_EVERY} and GLOBAL_EVERY={self.GLOBAL_EVERY} repeat after"
        f" {count} layers, more than {ranges.MOST_LAYERS}."
      )
    blocks = []
    for layer in range(1, count + 1):
      block = self.block()
      if layer % self.EXPERT_EVERY:
        block.mlp = self.dense_mlp()
      block.attention = self.attention() if layer % self.GLOBAL_EVERY else self.global_attention()
      blocks.append(block)
    return blocks

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.chunk = self.ATTENTION_CHUNK
    if self.USE_UNSCALED_QK_NORM:
      attention.qk_norm = fdl.Partial(layers.UnscaledRmsNorm, epsilon=self.NORM_EPSILON)
    return attention

  def global_attention(self) -> fdl.Partial[layers.Attention]:
    """Returns full attention without rotary positions."""
    attention = super().attention()
    attention.rope = None
    if self.USE_LONG_CONTEXT_SCALE:
      attention.query_scale = fdl.Partial(
        layers.long_context_scale,
        floor=self.LONG_CONTEXT_FLOOR,
        strength=self.LONG_CONTEXT_STRENGTH,
        first=1,
      )
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope, high = super().rope(), self.ROPE_HIGH
    rope.interleaved = True
    if self.ROPE_FACTOR is not None and self.ROPE_SCALING == "llama3":
      rope.scaling.high = high
    return rope

  def mlp(self) -> fdl.Partial:
    moe = super().mlp()
    fdl.update_callable(moe, layers.InputWeightedMoe)
    moe.choice = layers.routing.sigmoid_of_top_choice
    moe.shared = self.dense_mlp()
    moe.shared.hidden_dim = moe.experts.hidden_dim
    return moe

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("mlp_bias",),
      model_type="llama4_text",
      architecture="Llama4ForCausalLM",
      knobs={
        "intermediate_size_mlp": ("HIDDEN_DIMS", 16384),
        "intermediate_size": ("EXPERT_DIMS", 8192),
        "num_local_experts": ("NUM_EXPERTS", 16),
        "interleave_moe_layer_step": ("EXPERT_EVERY", 1),
        "no_rope_layer_interval": ("GLOBAL_EVERY", 4),
        "attention_chunk_size": ("ATTENTION_CHUNK", 8192),
        "use_qk_norm": ("USE_UNSCALED_QK_NORM", True),
        "attn_temperature_tuning": ("USE_LONG_CONTEXT_SCALE", True),
        "floor_scale": ("LONG_CONTEXT_FLOOR", 8192),
        "attn_scale": ("LONG_CONTEXT_STRENGTH", 0.1),
      },
      defaults={
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
      },
      nullable={"attention_chunk_size"},
      fixed={"num_experts_per_tok": 1},
      neutral={"router_aux_loss_coef", "router_jitter_noise", "for_llm_compressor"},
      rewritten=_without_layers,
      rope=HfRope(
        theta=500_000.0,
        types=("default", "linear", "llama3"),
        numbers={"llama3": {"high_freq_factor": ("ROPE_HIGH", 4.0)}},
      ),
      rules=_rules(),
      wrapper=_WITH_IMAGES,
    )


def _rules() -> Rules:
  """Returns the rules of feed-forward layers."""
  at = "model.layers.{}.feed_forward"
  rules: Rules = {
    "stack.{}.mlp.router.w": Matrix(f"{at}.router.weight"),
    "stack.{}.mlp.experts.down.w": Same(f"{at}.experts.down_proj"),
  }
  for index, name in enumerate(("gate", "up")):
    fused = f"{at}.experts.gate_up_proj"
    rules[f"stack.{{}}.mlp.experts.{name}.w"] = Fused(fused, index=index)
  for name in ("gate", "up", "down"):
    rules[f"stack.{{}}.mlp.{name}.w"] = Matrix(f"{at}.{name}_proj.weight")
    rules[f"stack.{{}}.mlp.shared.{name}.w"] = Matrix(f"{at}.shared_expert.{name}_proj.weight")
  return rules


def _without_layers(config: dict[str, Any]) -> dict[str, Any]:
  """Returns a configuration with intervals instead of lists of layers, which say the same.

  Raises:
    UserError: The layers of a list are not at an interval.
  """
  count = config.get("num_hidden_layers", 48)
  with_experts, rotary = config.pop("moe_layers", None), config.pop("no_rope_layers", None)
  if with_experts is not None:
    every = with_experts[0] + 1 if with_experts else 0
    if not every or with_experts != list(range(every - 1, count, every)):
      raise UserError(f"moe_layers={with_experts!r}: these layers are not at an interval.")
    config["interleave_moe_layer_step"] = every
  if rotary:  # An empty list counts as absent.
    every = rotary.index(0) + 1 if 0 in rotary else 0
    if not every or rotary != [int((layer + 1) % every != 0) for layer in range(count)]:
      raise UserError(f"no_rope_layers={rotary!r}: the layers without are not at an interval.")
    config["no_rope_layer_interval"] = every
  _check_types(config.pop("layer_types", None), config, count)
  if config.get("attn_temperature_tuning") is not None:  # 4 in published configurations.
    config["attn_temperature_tuning"] = bool(config["attn_temperature_tuning"])
  return config


def _check_types(types: Any, config: Mapping[str, Any], count: int):
  """Raises a UserError if given types of layers are not those that the other keys imply."""
  is_chunked = config.get("attention_chunk_size", 8192) is not None
  every = config.get("no_rope_layer_interval", 4)
  kinds = ("full_attention", "chunked_attention" if is_chunked else "full_attention")
  wanted = [kinds[(layer + 1) % every != 0] for layer in range(count)]
  if types is not None and types != wanted:
    raise UserError(f"layer_types is {types}: paxlike does not support it.")


@register
class Llama4Scout(datasets.Synthetic, Llama4):
  """The text model of Llama 4 Scout (17B active, 16 experts). 107,769,861,120 parameters."""

  NUM_LAYERS = 48
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 16384
  EXPERT_DIMS = 8192
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
  NUM_EXPERTS = 16
  ROPE_FACTOR = 8.0


@register
class Llama4ScoutInstruct(Llama4Scout):
  """Llama 4 Scout Instruct, with a context of 10,485,760 tokens."""

  MAX_SEQ_LEN = 10_485_760
  ROPE_FACTOR = 16.0
  ROPE_HIGH = 1.0


@register
class Llama4Maverick(Llama4Scout):
  """The text model of Llama 4 Maverick (17B active, 128 experts). 400,711,848,960 parameters."""

  NUM_EXPERTS = 128
  EXPERT_EVERY = 2
  USE_UNSCALED_QK_NORM = False
  ROPE_FACTOR = None


@register
class Llama4MaverickInstruct(Llama4Maverick):
  """Llama 4 Maverick Instruct, with a context of 1,048,576 tokens."""

  MAX_SEQ_LEN = 1_048_576
