# SPDX-License-Identifier: Apache-2.0
"""Reads JSON files of other programs: every key is read, ignored as without effect, or refused."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxlike.checkpoints import hf_keys as keys
from paxlike.config import knob_types
from paxlike.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
  """The known keys of one kind of file.

  Attributes:
    kinds: Key to read -> its type, with its range.
    defaults: Key -> its value if absent; a key in `kinds` without a default is required. Null
      counts as absent, unlike in a `config.json`, where null is a value.
    fixed: Key -> the only value, or tuple of values, that paxlike supports. Null and an empty list
      or mapping are always accepted.
    neutral: Keys without effect.
  """

  kinds: Mapping[str, Any]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, Any]
  neutral: frozenset[str]

  def read(self, given: Mapping[str, Any], *, place: str) -> dict[str, Any]:
    """Returns the value of each key in `kinds`; `place` is the file's name.

    Raises:
      UserError: A required key is absent, a key is unknown, or a value has another type, is out of
        range or is not supported.
    """
    for key, value in given.items():
      if key in self.fixed and keys.is_set(value) and not keys.is_one_of(value, self.fixed[key]):
        wanted = self.fixed[key]
        expected = "" if wanted is None else f"; expected {keys.spell(wanted)}"
        raise UserError(f"{place}: paxlike has no {key}={_short(value)}{expected}.")
      known = key in self.kinds or key in self.fixed or key in self.neutral
      if not known and keys.is_set(value):
        raise UserError(
          f"{place}: {key}={_short(value)} is not known to paxlike, so the converted model"
          " might differ. If it has no effect, remove it."
        )
    return {key: self._value(given, key, place) for key in self.kinds}

  def _value(self, given: Mapping[str, Any], key: str, place: str) -> Any:
    if given.get(key) is None:
      if key not in self.defaults:
        raise UserError(f"{place} lacks {key}.")
      return self.defaults[key]
    try:
      return knob_types.convert(self.kinds[key], given[key], text=False)
    except knob_types.RefusedError as error:
      raise UserError(f"{place}: {key}: {error}") from None


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) < 80 else f"{text[:77]}..."
