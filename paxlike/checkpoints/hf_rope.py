# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings in Hugging Face's `config.json`, old and new format.

transformers 5 writes `rope_parameters`, for Gemma 3 and OLMo 3 one per kind of attention; 4 wrote
`rope_theta`, `rope_scaling` and, for Gemma 3, `rope_local_base_freq`. Both formats are read; the
old one, which both versions read, is written.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from paxlike.checkpoints.hf_keys import is_one_of, spell
from paxlike.errors import UserError
from paxlike.layers.attention.rope import longrope_magnitude

_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"})
_LENGTH = "original_max_position_embeddings"
_SHARE = "partial_rotary_factor"
# By type: further keys and the value that paxlike implements, or a tuple of such values.
_FIXED: dict[str, dict[str, Any]] = {
  "default": {},
  "linear": {},
  "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
  "yarn": {
    "attention_factor": None,
    "beta_fast": (None, 32.0),
    "beta_slow": (None, 1.0),
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": (None, True),
  },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfRope:
  """The rotary position embedding of a family.

  Attributes:
    theta: Default of ROPE_THETA.
    local_theta: Default of LOCAL_ROPE_THETA; None in families without it.
    local_unscaled: Whether local layers have the same base and no scaling (OLMo 3).
    share: Default of ROPE_SHARE; None in families that rotate all dims.
    numbers: Kind of scaling -> key of it that is a knob -> (the knob, its default).
    types: The supported kinds of scaling.
    fixed: Key -> value that differs from other families', for YaRN scaling.
    absent: Default of `rope_parameters` if no scaling is given.
    knobs: Further required keys of `rope_parameters` -> their knobs.
    neutral: Further keys of it that have no effect.
  """

  theta: float = 10_000.0
  local_theta: float | None = None
  local_unscaled: bool = False
  share: float | None = None
  numbers: Mapping[str, Mapping[str, tuple[str, float]]] = dataclasses.field(default_factory=dict)
  types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  knobs: Mapping[str, str] = dataclasses.field(default_factory=dict)
  neutral: frozenset[str] = frozenset()

  @property
  def keys(self) -> frozenset[str]:
    """The keys of a configuration that it reads."""
    return _KEYS if self.share is None else _KEYS | {_SHARE}

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs that a configuration sets.

    Raises:
      UserError: It is unsupported, or contradicts itself.
    """
    rope, local = self._mappings(config)
    kind = self._check(rope)
    knobs: dict[str, Any] = {"ROPE_THETA": _theta(rope, config, "rope_theta", self.theta)}
    if local and (local_kind := self._check(local)) != "default":
      raise UserError(f"rope_parameters: type {local_kind} of local layers is not supported.")
    if self.local_unscaled and local.get("rope_theta", self.theta) != knobs["ROPE_THETA"]:
      # If absent, transformers takes the default, even if `rope_theta` is another.
      raise UserError(
        f"rope_theta is {knobs['ROPE_THETA']}, but {local.get('rope_theta', self.theta)} in layers"
        " of sliding attention: paxlike does not support it."
      )
    if self.share is not None:
      knobs["ROPE_SHARE"] = _given(rope, config, (_SHARE, _SHARE), self.share)
    if self.local_theta is not None:
      theta = _theta(local, config, "rope_local_base_freq", self.local_theta)
      knobs["LOCAL_ROPE_THETA"] = theta
    for key, knob in self.knobs.items():
      if rope.get(key) is None:
        raise UserError(f"rope_parameters lacks {key}.")
      knobs[knob] = rope[key]
    knobs["ROPE_FACTOR"] = None
    if kind != "default":
      if rope.get("factor") is None:
        raise UserError(f"rope_parameters of type {kind} lacks factor.")
      knobs |= {"ROPE_SCALING": kind, "ROPE_FACTOR": rope["factor"]}
    if kind in ("llama3", "yarn"):
      length = rope.get(_LENGTH)
      if length is None:
        length = config.get("max_position_embeddings")
      knobs["ROPE_ORIGINAL_LENGTH"] = length
    for key, (knob, default) in self.numbers.get(kind, {}).items():
      knobs[knob] = default if rope.get(key) is None else rope[key]
    return knobs

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration keys of a model with these knobs."""
    config: dict[str, Any] = {"rope_theta": values["ROPE_THETA"]}
    if self.local_theta is not None:
      config["rope_local_base_freq"] = values["LOCAL_ROPE_THETA"]
    if self.share is not None:
      config[_SHARE] = values["ROPE_SHARE"]
    if values["ROPE_FACTOR"] is None:
      if self.absent:
        config["rope_scaling"] = {"rope_type": "default"}
    else:
      config["rope_scaling"] = self._scaling(values)
    if self.local_unscaled:
      # transformers 5 does not read the base of local layers from the old format.
      local = {"rope_type": "default", "rope_theta": values["ROPE_THETA"]}
      full = local | config.get("rope_scaling", {})
      config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    return config

  def _scaling(self, values: Mapping[str, Any]) -> dict[str, Any]:
    kind = values["ROPE_SCALING"]
    rope = {"rope_type": kind, "factor": values["ROPE_FACTOR"]}
    if kind in ("llama3", "yarn"):
      rope[_LENGTH] = values["ROPE_ORIGINAL_LENGTH"]
    fixed = self._fixed(kind)
    if kind == "yarn":
      fixed |= {"beta_fast": 32.0, "beta_slow": 1.0}
    fixed |= {key: values[knob] for key, (knob, _) in self.numbers.get(kind, {}).items()}
    rope |= {key: value for key, value in fixed.items() if not isinstance(value, tuple | None)}
    return rope | {key: values[knob] for key, knob in self.knobs.items()}

  def _mappings(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings of all (or global) layers, and those of local layers."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
      if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{key} is not a mapping: {value!r}.")
    local: dict[str, Any] = {}
    if (self.local_unscaled or self.local_theta is not None) and new is not None:
      if strange := new.keys() - {"full_attention", "sliding_attention"}:
        raise UserError(f"rope_parameters has {min(strange)!r}, an unknown kind of attention.")
      local = dict(new.get("sliding_attention") or {})
      new = new.get("full_attention") or {}
    if new and old and {**new, "rope_theta": None} != {**old, "rope_theta": None}:
      raise UserError(
        f"rope_parameters={dict(new)} and rope_scaling={dict(old)} contradict each other."
      )
    if old or new is None:
      return dict(old or self.absent), local
    return dict(new), local  # Empty means no scaling, as in transformers.

  def _check(self, rope: Mapping[str, Any]) -> str:
    """Returns the kind of scaling.

    Raises:
      UserError: The family does not support it, or a key has an unsupported value.
    """
    kind = _kind(rope)
    if kind not in self.types:
      raise UserError(f"rope_type is {kind!r}; paxlike supports {', '.join(self.types)} here.")
    known = {"rope_type", "type", "rope_theta", *self.knobs, *self.neutral}
    if kind != "default":
      known |= {"factor", _LENGTH} if kind in ("llama3", "yarn") else {"factor"}
    if self.share is not None:
      known.add(_SHARE)
    fixed = {} if self.share is not None else {_SHARE: (None, 1.0)}
    fixed |= self._fixed(kind)
    for key in self.numbers.get(kind, {}):
      known.add(key)
      fixed.pop(key, None)
    if kind == "yarn" and "mscale" not in self.fixed:
      fixed["attention_factor"] = (None, _magnitude(rope.get("factor")))
    for key, wanted in fixed.items():
      if not is_one_of(rope.get(key), wanted):
        found = repr(rope[key]) if key in rope else "absent"
        raise UserError(f"{key} of rope_parameters is {found}, not {spell(wanted)}.")
    for key, value in rope.items():
      if key not in known and key not in fixed and value is not None:
        raise UserError(f"{key}={value!r} of rope_parameters is unknown.")
    return kind

  def _fixed(self, kind: str) -> dict[str, Any]:
    return {**_FIXED[kind], **(self.fixed if kind == "yarn" else {})}


def _kind(rope: Mapping[str, Any]) -> str:
  kinds = {str(rope[key]) for key in ("rope_type", "type") if rope.get(key) is not None}
  if len(kinds) > 1:
    raise UserError(
      f"rope_type={rope['rope_type']!r} and type={rope['type']!r} contradict each other."
    )
  return kinds.pop() if kinds else "default"


def _magnitude(factor: Any) -> float:
  """Returns the default of YaRN's `attention_factor`, which OLMo 3 states."""
  return 0.1 * math.log(factor) + 1 if isinstance(factor, int | float) and factor > 1 else 1.0


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any], key: str, default: float) -> float:
  return _given(rope, config, ("rope_theta", key), default)


def _given(
  rope: Mapping[str, Any], config: Mapping[str, Any], names: tuple[str, str], default: float
) -> float:
  """Returns a number by its names in the settings of rotary positions and in the configuration."""
  name, key = names
  given = {value for value in (rope.get(name), config.get(key)) if value is not None}
  if len(given) > 1:
    raise UserError(f"{key}={config[key]!r} and rope_parameters contradict each other.")
  return given.pop() if given else default


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfLongRope(HfRope):
  """The rotary position embedding of Phi-3: without scaling, or with LongRoPE.

  Attributes:
    length: Default of `original_max_position_embeddings`, which is a key of the whole
      configuration and has priority over that of `rope_parameters`.
  """

  share: float | None = 1.0
  length: int = 4096

  @property
  def keys(self) -> frozenset[str]:
    return super().keys | {_LENGTH}

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    rope, _ = self._mappings(config)
    if (kind := _kind(rope)) == "default":
      return super().read(config)
    if kind not in _LONG:
      raise UserError(f"rope_type is {kind!r}; paxlike supports default, longrope here.")
    of_all = {key: rope[key] for key in ("rope_theta", _SHARE) if key in rope}
    knobs = super().read({**config, "rope_scaling": None, "rope_parameters": of_all})
    for key, knob in _LONG_KNOBS.items():
      if rope.get(key) is None:
        raise UserError(f"rope_parameters of type {kind} lacks {key}.")
      knobs[knob] = rope[key]
    length = config.get(_LENGTH, self.length)
    if rope.get(_LENGTH) not in (None, length):
      raise UserError(
        f"{_LENGTH}={length} and {rope[_LENGTH]} of rope_parameters contradict each other."
      )
    factor = rope.get("factor")
    if factor is None:
      most = _at_least(1, "max_position_embeddings", config["max_position_embeddings"])
      factor = _stretch(most, _at_least(2, _LENGTH, length))
    magnitude = longrope_magnitude(_at_least(1, "factor", factor), _at_least(2, _LENGTH, length))
    if (found := rope.get("attention_factor")) not in (None, magnitude):
      raise UserError(f"attention_factor of rope_parameters is {found!r}, not {magnitude}.")
    known = {*of_all, *_LONG_KNOBS, "rope_type", "type", "factor", "attention_factor", _LENGTH}
    for key, value in rope.items():
      if key not in known and value is not None:
        raise UserError(f"{key}={value!r} of rope_parameters is unknown.")
    return knobs | {
      "ROPE_SCALING": "longrope",
      "ROPE_FACTOR": factor,
      "ROPE_ORIGINAL_LENGTH": length,
    }

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    config = super().write({**values, "ROPE_FACTOR": None})
    factor, length = values["ROPE_FACTOR"], values["ROPE_ORIGINAL_LENGTH"]
    if factor is None:
      return config
    rope = {"type": "longrope"} | {key: list(values[knob]) for key, knob in _LONG_KNOBS.items()}
    # transformers 4 accepts no further key, and computes the factor.
    if factor != _stretch(values["MAX_SEQ_LEN"], length):
      rope["factor"] = factor
    return {**config, "rope_scaling": rope, _LENGTH: length}


# Older names are "su" and "yarn".
_LONG = ("longrope", "su", "yarn")
_LONG_KNOBS = {"short_factor": "ROPE_SHORT_FACTORS", "long_factor": "ROPE_LONG_FACTORS"}


def _stretch(length: float, original: float) -> float:
  return max(length / original, 1.0)


def _at_least(least: int, key: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
    raise UserError(f"{key} is {value!r}, not a number of at least {least}.")
  return value
