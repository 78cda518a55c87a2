# SPDX-License-Identifier: Apache-2.0
"""Gemma 4 in Hugging Face's terms: its configuration and the names of its tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints import hf_keys
from paxlike.checkpoints.hf_layers import HfLayers
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import ExpertMatrices, Matrix, Rules, Same, stacked
from paxlike.errors import UserError

LOCAL, GLOBAL = "sliding_attention", "full_attention"
_SHARED = "num_kv_shared_layers"
# Kind of layer -> its type of rotary positions, and key -> (knob, default).
_ROPES: dict[str, tuple[str, dict[str, tuple[str, float]]]] = {
  GLOBAL: (
    "proportional",
    {"partial_rotary_factor": ("ROPE_SHARE", 0.25), "rope_theta": ("ROPE_THETA", 1_000_000.0)},
  ),
  LOCAL: ("default", {"rope_theta": ("LOCAL_ROPE_THETA", 10_000.0)}),
}
_WITH_IMAGES = hugging_face.Wrapper(
  model_type="gemma4",
  neutral=frozenset(
    {"vision_config", "audio_config", "image_token_id", "video_token_id", "audio_token_id"}
    | {"boi_token_id", "eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"}
  ),
  renamed={"model.language_model.": "model."},
  dropped=r"model\.(vision_tower|vision_embedder|embed_vision|audio_tower|embed_audio)\..*",
)


def family(of_gemma: hugging_face.Family) -> hugging_face.Family:
  """Returns the family of Gemma 4, given that of Gemma."""
  # Unlike in Gemma, neither may be null.
  nullable = of_gemma.nullable - {"num_key_value_heads", "head_dim"}
  return dataclasses.replace(of_gemma, nullable=nullable).variant(
    lacking=("hidden_act",),
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    knobs={
      "sliding_window": ("WINDOW", 512),
      "final_logit_softcapping": ("LOGITS_SOFT_CAP", None),
      "global_head_dim": ("DIMS_PER_GLOBAL_HEAD", 512),
      "num_global_key_value_heads": ("NUM_GLOBAL_KV_HEADS", None),
      "attention_k_eq_v": ("USE_KEYS_AS_VALUES", False),
      "use_double_wide_mlp": ("USE_DOUBLE_WIDE_MLP", False),
      "hidden_size_per_layer_input": ("PER_LAYER_DIMS", 256),
      "num_experts": ("NUM_EXPERTS", 0),
      "top_k_experts": ("NUM_EXPERTS_PER_TOKEN", 0),
      "moe_intermediate_size": ("EXPERT_DIMS", None),
    },
    defaults={
      "vocab_size": 262_144,
      "hidden_size": 2304,
      "intermediate_size": 9216,
      "num_hidden_layers": 30,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "max_position_embeddings": 131_072,
    },
    nullable={"final_logit_softcapping", "num_global_key_value_heads", "moe_intermediate_size"},
    derived={
      "enable_moe_block": lambda config: bool(config["num_experts"]),
      "vocab_size_per_layer_input": lambda config: config["vocab_size"],
    },
    fixed={
      "hidden_activation": hf_keys.GELU_TANH,
      "use_bidirectional_attention": (None, "vision"),  # Tokens of images attend to each other.
    },
    # Which transformers does not read.
    neutral={"expert_intermediate_size", "sliding_window_pattern"},
    rewritten=_rewritten,
    layers=_Layers(),
    rope=_Rope(),
    rules=_rules(),
    # Layers without keys of their own are published with some; none in other models.
    ignored={
      r"(?:model\.layers\.\d+\.self_attn\.(?:[kv]_proj|k_norm)\.weight){0,{NUM_KV_LAYERS}}",
    },
    wrapper=_WITH_IMAGES,
  )


def unified(of_gemma4: hugging_face.Family) -> hugging_face.Family:
  """Returns the family of Gemma 4 12B, whose configuration has neither experts nor embeddings."""
  return of_gemma4.variant(
    lacking=(
      *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
      *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
    ),
    model_type="gemma4_unified_text",
    architecture="Gemma4UnifiedForCausalLM",
    defaults={"max_position_embeddings": 262_144, "sliding_window": 1024},
    rewritten=_without_layers,
    wrapper=dataclasses.replace(_WITH_IMAGES, model_type="gemma4_unified"),
  )


def kind(layer: int, every: int) -> str:
  """Returns the kind of a layer of attention, the last one of a model apart."""
  return LOCAL if (layer + 1) % every else GLOBAL


def _rules() -> Rules:
  """Returns the rules of weights that Gemma lacks, or names differently."""
  at, mlp, theirs = "model.layers.{}", "stack.{}.mlp", "model.layers.{}.mlp"
  own = "stack.{}.per_layer_input"
  rules: Rules = {
    "stack.{}.attention_post_norm.scale": Same(f"{at}.post_attention_layernorm.weight"),
    "stack.{}.mlp_post_norm.scale": Same(f"{at}.post_feedforward_layernorm.weight"),
    "stack.{}.output_scale": Same(f"{at}.layer_scalar"),
    f"{own}.gate.w": Matrix(f"{at}.per_layer_input_gate.weight"),
    f"{own}.output.w": Matrix(f"{at}.per_layer_projection.weight"),
    f"{own}.norm.scale": Same(f"{at}.post_per_layer_input_norm.weight"),
    "layer_inputs.table": Same("model.embed_tokens_per_layer.weight"),
    "layer_inputs.projection.w": Matrix("model.per_layer_model_projection.weight"),
    "layer_inputs.norm.scale": Same("model.per_layer_projection_norm.weight"),
    f"{mlp}.router_norm.scale": Same(f"{at}.router.scale"),
    f"{mlp}.router.w": Matrix(f"{at}.router.proj.weight"),
    f"{mlp}.expert_scale": Same(f"{at}.router.per_expert_scale"),
    f"{mlp}.shared_post_norm.scale": Same(f"{at}.post_feedforward_layernorm_1.weight"),
    f"{mlp}.routed_norm.scale": Same(f"{at}.pre_feedforward_layernorm_2.weight"),
    f"{mlp}.routed_post_norm.scale": Same(f"{at}.post_feedforward_layernorm_2.weight"),
    f"{mlp}.experts.down.w": ExpertMatrices(f"{at}.experts.down_proj"),
  }
  experts = {f"{mlp}.experts.{role}.w": ExpertMatrices("") for role in ("gate", "up")}
  rules |= stacked(f"{at}.experts.gate_up_proj", experts, axis=1)
  for norm in (f"{mlp}_norm", f"{mlp}.shared_norm"):
    rules[f"{norm}.scale"] = Same(f"{at}.pre_feedforward_layernorm.weight")
  for role in ("gate", "up", "down"):
    rules[f"{mlp}.shared.{role}.w"] = Matrix(f"{theirs}.{role}_proj.weight")
  return rules


class _Layers(HfLayers):
  """The kinds of layers, and which have keys and values of their own."""

  @property
  def keys(self) -> frozenset[str]:
    return frozenset({"layer_types", _SHARED})

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    count, types = config["num_hidden_layers"], config.get("layer_types")
    shared, every = config.get(_SHARED) or 0, min(6, count)
    if types is not None:
      every = types.index(GLOBAL) + 1 if isinstance(types, list) and GLOBAL in types else 1
      if types != _types(count, every):
        raise UserError(f"layer_types is {types}: paxlike does not support it.")
    if not 0 <= shared < count:
      raise UserError(f"{_SHARED} is {shared!r}, of {count} layers.")
    return {"GLOBAL_EVERY": every, "NUM_KV_LAYERS": count - shared if shared else None}

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    count, own = values["NUM_LAYERS"], values["NUM_KV_LAYERS"]
    shared = 0 if own is None else max(count - own, 0)
    return {"layer_types": _types(count, values["GLOBAL_EVERY"]), _SHARED: shared}


def _types(count: int, every: int) -> list[str]:
  return [*(kind(layer, every) for layer in range(count - 1)), GLOBAL]


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


def _rewritten(config: dict[str, Any]) -> dict[str, Any]:
  """Returns a configuration without keys that others switch off, and as `_without_layers`."""
  if not config.get("enable_moe_block"):
    config |= {"num_experts": 0, "top_k_experts": 0, "moe_intermediate_size": None}
  config["hidden_size_per_layer_input"] = config.get("hidden_size_per_layer_input", 256) or 0
  if not config["hidden_size_per_layer_input"]:
    config["vocab_size_per_layer_input"] = None
  return _without_layers(config)


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
  wanted = [str(layer) for layer, kind in enumerate(types) if kind == GLOBAL]
  options = list(layers_given.values()) if isinstance(layers_given, Mapping) else []
  first = options[0] if options and isinstance(options[0], Mapping) else {}
  alike = all(option == first for option in options) and first.keys() <= {
    "head_dim",
    "num_key_value_heads",
  }
  if not alike or sorted(map(str, layers_given)) != sorted(wanted):
    raise UserError(
      f"per_layer_config={layers_given!r} is more than the heads of all layers of {GLOBAL}."
    )
  config["global_head_dim"] = first.get("head_dim", config.get("head_dim"))
  config["num_global_key_value_heads"] = first.get("num_key_value_heads")
  return config
