# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face calls a family of models: its configuration and the names of its weights."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from paxlike.errors import UserError
from paxlike.weight_rules import Rules

_ABSENT = object()
_ROPE_TYPE = "rope_scaling.rope_type"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A family as its `config.json` and safetensors files have it, for both directions.

  Attributes:
    model_type: Of the configuration.
    architecture: Class of transformers that has the weights.
    knobs: Key of the configuration -> knob; "a.b" is key b of the mapping a.
    defaults: What absent keys mean; of those without it none may be absent.
    fixed: Keys that must have this value; absent, or None, they have it if `defaults` has no other.
    layer_types: Kinds of attention of the layers, over and over; none: all are alike.
    rope_types: The ways in which rotary positions may be scaled; None: not.
    rules: Where each weight stands.
    prefix: Begins the names of tensors, if they were not saved without the outermost module.
    ignored: Patterns (`re`) of tensors that may be there, and hold nothing that is needed; `{KNOB}`
      stands for its value.
  """

  model_type: str
  architecture: str
  knobs: Mapping[str, str]
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  layer_types: tuple[str, ...] = ()
  rope_types: tuple[str | None, ...] = (None,)
  rules: Rules
  prefix: str = ""
  ignored: tuple[str, ...] = ()

  def mismatch(self, config: Mapping[str, Any]) -> str:
    """Returns why `config` is none of this family, "" if it is one."""
    if config.get("model_type") != self.model_type:
      return f"model_type is {config.get('model_type')}"
    rope_type = _get(config, _ROPE_TYPE)
    for key, value in self.fixed.items():
      if key.startswith("rope_scaling.") and rope_type is _ABSENT:
        continue
      found = _get(config, key)
      found = self.defaults.get(key, _ABSENT) if found is _ABSENT else found
      if found is not _ABSENT and found != value:
        return f"{key} is {found!r}, not {value!r}"
    types = config.get("layer_types")
    if types is not None and types != self._layer_types(len(types)):
      return f"layer_types is {types}"
    if (None if rope_type is _ABSENT else rope_type) not in self.rope_types:
      return f"{_ROPE_TYPE} is {'absent' if rope_type is _ABSENT else rope_type}"
    return ""

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs that `config` sets.

    Raises:
      UserError: A key is absent.
    """
    values = {}
    for key, knob in self.knobs.items():
      values[knob] = _get(config, key)
      if values[knob] is _ABSENT:
        if key not in self.defaults:
          raise UserError(f"config.json of a {self.model_type} model lacks {key}.")
        values[knob] = self.defaults[key]
    return values

  def write(self, values: Mapping[str, Any], *, dtype: str) -> dict[str, Any]:
    """Returns the `config.json` of a model with these knobs, its weights in `dtype`."""
    config: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.model_type}
    pairs = {key: values[knob] for key, knob in self.knobs.items()}
    scaled = pairs.get("rope_scaling.factor") is not None
    pairs |= {**self.fixed, _ROPE_TYPE: self.rope_types[-1], "torch_dtype": dtype}
    if self.layer_types:
      pairs["layer_types"] = self._layer_types(values["NUM_LAYERS"])
    for key, value in pairs.items():
      if key.startswith("rope_scaling.") and not scaled:
        continue
      *outer, last = key.split(".")
      place = config
      for part in outer:
        place = place.setdefault(part, {})
      place[last] = value
    return config

  def is_ignored(self, name: str, values: Mapping[str, Any]) -> bool:
    """Returns whether a tensor of a model with these knobs may be left aside."""
    return any(re.fullmatch(_with_knobs(pattern, values), name) for pattern in self.ignored)

  def _layer_types(self, num_layers: int) -> list[str]:
    kinds = self.layer_types or ("full_attention",)
    return [kinds[layer % len(kinds)] for layer in range(num_layers)]


def _with_knobs(pattern: str, values: Mapping[str, Any]) -> str:
  return re.sub(r"\{([A-Z_]+)\}", lambda match: str(values[match[1]]), pattern)


def _get(config: Mapping[str, Any], key: str) -> Any:
  value: Any = config
  for part in key.split("."):
    value = value.get(part) if isinstance(value, Mapping) else None
  return _ABSENT if value is None else value


def normalized(config: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a configuration as transformers 4 wrote it; 5 keeps all about RoPE in one mapping."""
  config = dict(config)
  if "num_local_experts" in config:
    config.setdefault("num_experts", config["num_local_experts"])
  rope = config.pop("rope_parameters", None)
  if rope is None:
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and "type" in scaling:
      config["rope_scaling"] = {"rope_type": scaling["type"], **scaling}
    return config
  if not isinstance(rope, dict):
    raise UserError("config.json: rope_parameters is no mapping.")
  if "full_attention" in rope:
    config["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
    rope = rope["full_attention"]
  config["rope_theta"] = rope.get("rope_theta")
  if rope.get("rope_type", "default") != "default":
    config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
  return config
