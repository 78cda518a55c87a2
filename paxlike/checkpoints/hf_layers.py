# SPDX-License-Identifier: Apache-2.0
"""The kinds of a model's layers in Hugging Face's `config.json`.

They are a list (`layer_types`, `layers_block_type`) or a string of one letter per layer
(`hybrid_override_pattern`).
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from paxlike.errors import UserError
from paxlike.layers.layer_pattern import Sections

_LISTS = ("layer_types", "layers_block_type")
_LETTERS = "hybrid_override_pattern"
_COUNT = "num_hidden_layers"
_PERIODS = ("sliding_window_pattern", "_sliding_window_pattern")


class HfLayers(abc.ABC):
  """The keys of a configuration with a value for each layer, or for some of them."""

  @property
  @abc.abstractmethod
  def keys(self) -> frozenset[str]:
    """Those keys, present or not."""

  @abc.abstractmethod
  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the knobs that a configuration sets, which has the defaults of absent keys.

    Raises:
      UserError: It lacks the layers, has unknown ones, or contradicts itself.
    """

  @abc.abstractmethod
  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration keys of a model with these knobs."""


@dataclasses.dataclass(frozen=True)
class LayerPattern(HfLayers):
  """Layers of a fixed pattern that repeats, which sets no knob.

  Attributes:
    types: The pattern of `layer_types`, which may be absent.
    others: Further key -> pattern of its values, one per layer; it may be absent, too.
  """

  types: tuple[str, ...]
  others: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

  @property
  def keys(self) -> frozenset[str]:
    return frozenset({_LISTS[0], *_PERIODS, *self.others})

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
    for key, wanted in self._by_layer(config[_COUNT]).items():
      if config.get(key) not in (None, wanted):
        raise UserError(f"{key} is {config[key]}: paxlike does not support it.")
    if config.get(_LISTS[0]) is None:
      for key in _PERIODS:
        if config.get(key) not in (None, len(self.types)):
          raise UserError(f"{key} is {config[key]!r}, not {len(self.types)}.")
    return {}

  def write(self, values: Mapping[str, Any]) -> dict[str, Any]:
    return self._by_layer(values["NUM_LAYERS"])

  def _by_layer(self, num_layers: int) -> dict[str, list[Any]]:
    patterns: dict[str, Sequence[Any]] = {_LISTS[0]: self.types, **self.others}
    return {
      key: [pattern[layer % len(pattern)] for layer in range(num_layers)]
      for key, pattern in patterns.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKinds(HfLayers):
  """Layers in any order, as the knobs LAYER_TYPES and NUM_LAYERS.

  Attributes:
    names: Name of a kind in the list -> the kind. The first name of a kind is written.
    letters: Letter of a kind in the string -> the kind; empty: the family has no such string. If
      there are letters, the string is written instead of the list.
  """

  names: Mapping[str, str]
  letters: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def keys(self) -> frozenset[str]:
    return frozenset({*_LISTS, _LETTERS, _COUNT})

  def read(self, config: Mapping[str, Any]) -> dict[str, Any]:
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
