# SPDX-License-Identifier: Apache-2.0
"""The dense text model of Gemma 4 (Gemma Team, 2026), of which 31B is published.

Five local layers per global one, which is also the last. Queries, keys and values are normalized;
logits are not scaled. Global layers have wider and fewer heads, their values are their keys, and
they rotate a quarter of the pairs of dims. A stored factor multiplies the output of each block.

Refused, by the key of `config.json`: the embeddings per layer and the layers that share keys and
values of E2B and E4B (hidden_size_per_layer_input, num_kv_shared_layers), and the experts of
26B-A4B (enable_moe_block).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints import hf_keys
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Same
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.gemma import Gemma
from paxlike.registry import register

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Kind of layer -> its type of rotary positions, and key -> (knob, default).
_ROPES: dict[str, tuple[str, dict[str, tuple[str, float]]]] = {
  _GLOBAL: (
    "proportional",
    {"partial_rotary_factor": ("ROPE_SHARE", 0.25), "rope_theta": ("ROPE_THETA", 1_000_000.0)},
  ),
  _LOCAL: ("default", {"rope_theta": ("LOCAL_ROPE_THETA", 10_000.0)}),
}
_WITH_IMAGES = hugging_face.Wrapper(
  model_type="gemma4",
  neutral=frozenset(
    {"vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id"}
    | {"boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"}
  ),
  fixed={},
  renamed={"model.language_model.": "model."},
  dropped=r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",
)


class Gemma4(Gemma):
  """Dense text models of Gemma 4. DIMS_PER_HEAD and NUM_KV_HEADS are those of local layers."""

  VOCAB_SIZE = 262_144
  MAX_SEQ_LEN = 262_144
  ROPE_THETA = 1_000_000.0
  WINDOW: ranges.Positive = 1024  #: Attention window of local layers, including the current token.
  LOCAL_ROPE_THETA: ranges.Base = 10_000.0  #: ROPE_THETA of local layers.
  ROPE_SHARE: ranges.Share = 0.25  #: Share of the pairs of dims that global layers rotate.
  DIMS_PER_GLOBAL_HEAD: ranges.Size = 512  #: Width of a head of global layers.
  #: Number of KV heads of global layers. None: NUM_KV_HEADS.
  NUM_GLOBAL_KV_HEADS: ranges.Size | None = None
  USE_KEYS_AS_VALUES: bool = True  #: Whether the values of global layers are their keys.
  LOGITS_SOFT_CAP: ranges.Cap | None = 30.0  #: Soft cap of output logits.

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.soft_cap = self.LOGITS_SOFT_CAP
    return model

  def norm(self) -> fdl.Partial:
    return fdl.Partial(layers.RmsNorm, epsilon=self.NORM_EPSILON)

  def stack(self) -> fdl.Partial[layers.Stack]:
    stack = super().stack()
    if rest := list(getattr(stack, "epilogue", ())):
      stack.epilogue = [*rest[:-1], self.block()]
    return stack

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    return [*(self.local_block() for _ in range(5)), self.block()]

  def block(self) -> fdl.Partial[layers.Block]:
    block = self.local_block()
    attention = block.attention
    attention.window = None
    attention.head_dim = self.DIMS_PER_GLOBAL_HEAD
    attention.num_kv_heads = self.NUM_GLOBAL_KV_HEADS or self.NUM_KV_HEADS
    attention.rope = self.rope()
    if self.USE_KEYS_AS_VALUES:
      attention.value = None
    return block

  def local_block(self) -> fdl.Partial[layers.Block]:
    """Returns a layer with sliding-window attention."""
    block = super().block()
    block.post_norm = self.norm()
    block.output_scale = fdl.Partial(layers.constant, value=1.0)
    block.attention.window = self.WINDOW
    block.attention.rope = fdl.Partial(layers.Rope, theta=self.LOCAL_ROPE_THETA)
    return block

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.qk_norm = self.norm()
    attention.value_norm = fdl.Partial(layers.UnscaledRmsNorm, epsilon=self.NORM_EPSILON)
    attention.scale = 1.0
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope = super().rope()
    if self.ROPE_FACTOR is not None:
      raise UserError("ROPE_FACTOR: Gemma 4 has no scaling of rotary positions; leave it None.")
    rope.scaling = fdl.Partial(layers.rope.proportional, share=self.ROPE_SHARE)
    return rope

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    at = "model.layers.{}"
    return dataclasses.replace(
      family,
      model_type="gemma4_text",
      architecture="Gemma4ForCausalLM",
      knobs={
        **family.knobs,
        "sliding_window": "WINDOW",
        "final_logit_softcapping": "LOGITS_SOFT_CAP",
        "global_head_dim": "DIMS_PER_GLOBAL_HEAD",
        "num_global_key_value_heads": "NUM_GLOBAL_KV_HEADS",
        "attention_k_eq_v": "USE_KEYS_AS_VALUES",
      },
      defaults={
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
      },
      nullable=frozenset({"final_logit_softcapping", "num_global_key_value_heads"}),
      fixed={
        "hidden_activation": hf_keys.GELU_TANH,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_bidirectional_attention": (None, "vision"),  # Tokens of images attend to each other.
      },
      neutral=frozenset(
        {"vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts"}
        | {"moe_intermediate_size", "expert_intermediate_size"}
      ),
      rewritten=_without_layers,
      layer_types=(*[_LOCAL] * 5, _GLOBAL),
      last_type=_GLOBAL,
      rope=_Rope(),
      rules={
        **family.rules,
        "stack.{}.attention_post_norm.scale": Same(f"{at}.post_attention_layernorm.weight"),
        "stack.{}.mlp_norm.scale": Same(f"{at}.pre_feedforward_layernorm.weight"),
        "stack.{}.mlp_post_norm.scale": Same(f"{at}.post_feedforward_layernorm.weight"),
        "stack.{}.output_scale": Same(f"{at}.layer_scalar"),
      },
      wrapper=_WITH_IMAGES,
    )


class _Rope(HfRope):
  """Rotary positions of each kind of layer."""

  @property
  def keys(self) -> frozenset[str]:
    return frozenset({"rope_parameters"})

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters")
    if given is None:
      return {knob: default for _, keys in _ROPES.values() for knob, default in keys.values()}
    if not isinstance(given, Mapping) or given.keys() != _ROPES.keys():
      raise UserError(f"rope_parameters is {given!r}; expected those of {' and '.join(_ROPES)}.")
    knobs = {}
    for kind, (wanted, keys) in _ROPES.items():
      rope = given[kind]
      if not isinstance(rope, Mapping) or rope.get("rope_type") != wanted:
        raise UserError(f"rope_parameters of {kind} is {rope!r}: its rope_type is not {wanted!r}.")
      if strange := sorted(rope.keys() - keys.keys() - {"rope_type"}):
        raise UserError(f"{strange[0]} of rope_parameters of {kind} is unknown.")
      for key, (knob, _) in keys.items():
        if rope.get(key) is None:
          raise UserError(f"rope_parameters of {kind} lacks {key}.")
        knobs[knob] = rope[key]
    return knobs

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    return {
      "rope_parameters": {
        kind: {"rope_type": wanted, **{key: values[knob] for key, (knob, _) in keys.items()}}
        for kind, (wanted, keys) in _ROPES.items()
      }
    }


def _without_layers(config: dict[str, Any]) -> dict[str, Any]:
  """Returns a configuration with the keys of global layers instead of those of each layer.

  Published configurations have the former, transformers writes the latter.
  """
  layers_given = config.pop("per_layer_config", None)
  if not config.get("attention_k_eq_v"):
    config["num_global_key_value_heads"] = None  # Not used then.
  if layers_given is None:
    return config
  types = config.get("layer_types")
  types = types if isinstance(types, list) else []
  wanted = [str(layer) for layer, kind in enumerate(types) if kind == _GLOBAL]
  options = list(layers_given.values()) if isinstance(layers_given, Mapping) else []
  first = options[0] if options and isinstance(options[0], Mapping) else {}
  alike = all(option == first for option in options) and first.keys() <= {
    "head_dim",
    "num_key_value_heads",
  }
  if not alike or sorted(map(str, layers_given)) != sorted(wanted):
    raise UserError(
      f"per_layer_config={layers_given!r} is more than the heads of all layers of {_GLOBAL}."
    )
  config["global_head_dim"] = first.get("head_dim", config.get("head_dim"))
  config["num_global_key_value_heads"] = first.get("num_key_value_heads")
  return config


@register
class Gemma4_31B(datasets.Synthetic, Gemma4):
  """The text model of Gemma 4 31B. 30,697,345,280 parameters."""

  NUM_LAYERS = 60
  MODEL_DIMS = 5376
  HIDDEN_DIMS = 21504
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  NUM_GLOBAL_KV_HEADS = 4
