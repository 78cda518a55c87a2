# SPDX-License-Identifier: Apache-2.0
"""The kinds of the layers of hybrid models in Hugging Face's `config.json`.

They are a list (`layer_types`, `layers_block_type`) or a string of one letter per layer
(`hybrid_override_pattern`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from paxlike.errors import UserError
from paxlike.layers.layer_pattern import Sections

_LISTS = ("layer_types", "layers_block_type")
_LETTERS = "hybrid_override_pattern"
_COUNT = "num_hidden_layers"
KEYS = frozenset({*_LISTS, _LETTERS, _COUNT})


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfLayers:
  """The layers of a family, as the knobs LAYER_TYPES and NUM_LAYERS.

  Attributes:
    names: Name of a kind in the list -> the kind. The first name of a kind is written.
    letters: Letter of a kind in the string -> the kind; empty: the family has no such string. If
      there are letters, the string is written instead of the list.
  """

  names: Mapping[str, str]
  letters: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs that a configuration sets.

    Raises:
      UserError: It lacks the layers, has unknown ones, or contradicts itself.
    """
    found = {key: self._kinds(key, config[key]) for key in (*_LISTS, _LETTERS) if config.get(key)}
    if not found:
      raise UserError(f"the model lacks {_LETTERS if self.letters else _LISTS[0]}.")
    first, *others = found
    for key in others:
      if found[key] != found[first]:
        raise UserError(f"{key} and {first} contradict each other.")
    kinds = found[first]
    if config.get(_COUNT) not in (None, len(kinds)):
      raise UserError(f"{_COUNT} is {config[_COUNT]!r}, but {first} has {len(kinds)} layers.")
    return {"LAYER_TYPES": kinds, "NUM_LAYERS": len(kinds)}

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration keys of a model with these knobs."""
    kinds = Sections.of(values["LAYER_TYPES"]).with_layers(values["NUM_LAYERS"]).kinds
    if self.letters:
      letters = {kind: letter for letter, kind in self.letters.items()}
      return {_LETTERS: "".join(letters[kind] for kind in kinds), _COUNT: len(kinds)}
    names = {kind: name for name, kind in reversed([*self.names.items()])}
    return {_LISTS[0]: [names[kind] for kind in kinds], _COUNT: len(kinds)}

  def _kinds(self, key: str, value: Any) -> tuple[str, ...]:
    known = self.letters if key == _LETTERS else self.names
    if not isinstance(value, str if key == _LETTERS else list):
      raise UserError(f"{key} is {value!r}.")
    for name in value:
      if name not in known:
        raise UserError(f"{key} has {name!r}; paxlike knows {', '.join(known)} here.")
    return tuple(known[name] for name in value)
