# SPDX-License-Identifier: Apache-2.0
"""What Hugging Face says of rotary positions: one mapping today, three keys before.

transformers 5 writes `rope_parameters`, for Gemma 3 one for each kind of attention; 4 wrote
`rope_theta`, `rope_scaling` and, for Gemma 3, `rope_local_base_freq`. Both are read; written is
what both versions read.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxlike.errors import UserError
from paxlike.hugging_face_keys import is_one_of, spell

KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq"})
_LENGTH = "original_max_position_embeddings"
# The values of further keys for which ours is right, by type; a tuple holds all that are.
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
class Rope:
  """The rotary positions of a family.

  Attributes:
    theta: ROPE_THETA where none is given.
    local_theta: The same of LOCAL_ROPE_THETA, in families that have it.
    types: The kinds of scaling that the family has.
    fixed: Key -> value, where it is not that of other families; of scaling by YaRN.
    absent: What stands for `rope_parameters` where no scaling is given.
  """

  theta: float = 10_000.0
  local_theta: float | None = None
  types: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs that a configuration sets.

    Raises:
      UserError: It has what paxlike lacks, or says two things.
    """
    rope, local = self._mappings(config)
    kind = self._check(rope)
    knobs: dict[str, Any] = {"ROPE_THETA": _theta(rope, config, "rope_theta", self.theta)}
    if self.local_theta is not None:
      if (local_kind := _kind(local)) != "default":
        raise UserError(f"rope_parameters: {local_kind} of local layers is not known.")
      self._check(local)
      theta = _theta(local, config, "rope_local_base_freq", self.local_theta)
      knobs["LOCAL_ROPE_THETA"] = theta
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
    return knobs

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a model with these knobs."""
    config: dict[str, Any] = {"rope_theta": values["ROPE_THETA"]}
    if self.local_theta is not None:
      config["rope_local_base_freq"] = values["LOCAL_ROPE_THETA"]
    if values["ROPE_FACTOR"] is None:
      if self.absent:
        config["rope_scaling"] = {"rope_type": "default"}
      return config
    kind = values["ROPE_SCALING"]
    rope = {"rope_type": kind, "factor": values["ROPE_FACTOR"]}
    if kind in ("llama3", "yarn"):
      rope[_LENGTH] = values["ROPE_ORIGINAL_LENGTH"]
    fixed = self._fixed(kind)
    if kind == "yarn":
      fixed |= {"beta_fast": 32.0, "beta_slow": 1.0}
    rope |= {key: value for key, value in fixed.items() if not isinstance(value, tuple | None)}
    return {**config, "rope_scaling": rope}

  def _mappings(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what is said of all layers, or the global ones, and of local ones."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
      if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{key} is no mapping: {value!r}.")
    local: dict[str, Any] = {}
    if self.local_theta is not None and new is not None:
      if strange := new.keys() - {"full_attention", "sliding_attention"}:
        raise UserError(f"rope_parameters has {min(strange)!r}, which is no kind of attention.")
      local = dict(new.get("sliding_attention") or {})
      new = new.get("full_attention") or {}
    if new and old and dict(new) != dict(old):
      raise UserError(f"rope_parameters={dict(new)} and rope_scaling={dict(old)} say two things.")
    if old or new is None:
      return dict(old or self.absent), local
    return dict(new), local  # Empty, it stands for no scaling, as transformers has it.

  def _check(self, rope: Mapping[str, Any]) -> str:
    """Returns the kind of scaling.

    Raises:
      UserError: The family lacks it, or a key has a value that makes it another one than ours.
    """
    kind = _kind(rope)
    if kind not in self.types:
      raise UserError(f"rope_type is {kind!r}; paxlike has {', '.join(self.types)} here.")
    known = {"rope_type", "type", "rope_theta"}
    if kind != "default":
      known |= {"factor", _LENGTH} if kind in ("llama3", "yarn") else {"factor"}
    fixed = {"partial_rotary_factor": (None, 1.0), **self._fixed(kind)}
    for key, wanted in fixed.items():
      if not is_one_of(rope.get(key), wanted):
        found = repr(rope[key]) if key in rope else "absent"
        raise UserError(f"{key} of rotary positions is {found}, not {spell(wanted)}.")
    for key, value in rope.items():
      if key not in known and key not in fixed and value is not None:
        raise UserError(f"{key}={value!r} of rotary positions is not known.")
    return kind

  def _fixed(self, kind: str) -> dict[str, Any]:
    return {**_FIXED[kind], **(self.fixed if kind == "yarn" else {})}


def _kind(rope: Mapping[str, Any]) -> str:
  kinds = {str(rope[key]) for key in ("rope_type", "type") if rope.get(key) is not None}
  if len(kinds) > 1:
    raise UserError(f"rope_type={rope['rope_type']!r} and type={rope['type']!r} say two things.")
  return kinds.pop() if kinds else "default"


def _theta(rope: Mapping[str, Any], config: Mapping[str, Any], key: str, default: float) -> float:
  given = {value for value in (rope.get("rope_theta"), config.get(key)) if value is not None}
  if len(given) > 1:
    raise UserError(f"{key}={config[key]!r} and rope_parameters say two things.")
  return given.pop() if given else default
