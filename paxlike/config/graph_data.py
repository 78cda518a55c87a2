# SPDX-License-Identifier: Apache-2.0
"""A graph as plain data, for printing and comparing; it cannot be built.

Functions and classes are names, so that an untrusted file can be inspected without resolving them.
"""

import dataclasses
import inspect
from typing import Any

import fiddle as fdl

from paxlike.config import allowed_symbols
from paxlike.errors import UserError


class Symbol(str):
  """The name of a function, class or enum member: "module:qualified.name"."""

  __slots__ = ()

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Symbol) and str.__eq__(self, other)

  def __ne__(self, other: object) -> bool:
    return not self == other

  def __hash__(self) -> int:
    return str.__hash__(self)


@dataclasses.dataclass(eq=False)
class Part:
  """A node of a graph: a `Config`, `Partial` or `ArgFactory`.

  Attributes:
    kind: The name of its class.
    target: The callable: a `Symbol`, or the value itself if it has no name.
    arguments: The arguments that are set, in signature order if known.
    defaults: Defaults of the signature; empty if unknown.
  """

  kind: str
  target: Any
  arguments: dict[str | int, Any]
  defaults: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __eq__(self, other: object) -> bool:
    """Returns whether both are equal; an argument set to its default equals one not set."""
    if not isinstance(other, Part) or (self.kind, self.target) != (other.kind, other.target):
      return False
    defaults = self.defaults or other.defaults
    return {**defaults, **self.arguments} == {**defaults, **other.arguments}

  __hash__ = None  # pyright: ignore[reportAssignmentType]


def of(graph: Any) -> Any:
  """Returns a graph as data; shared values stay shared."""
  return _of(graph, {})


def _of(value: Any, seen: dict[int, Any]) -> Any:
  if isinstance(value, Part):
    return value
  if id(value) in seen:
    return seen[id(value)]
  made = _made(value, seen)
  if isinstance(value, fdl.Buildable | dict | list | tuple):
    seen[id(value)] = made
  return made


def _made(value: Any, seen: dict[int, Any]) -> Any:
  if isinstance(value, fdl.Buildable):
    given: dict[Any, Any] = value.__arguments__
    parameters = value.__signature_info__.parameters
    order = [name for name in dict.fromkeys([*parameters, *given]) if name in given]
    defaults = {
      name: _of(parameter.default, seen)
      for name, parameter in parameters.items()
      if parameter.default is not inspect.Parameter.empty
    }
    arguments = {name: _of(given[name], seen) for name in order}
    return Part(type(value).__name__, _symbol(fdl.get_callable(value)), arguments, defaults)
  if type(value) is dict:
    return {_of(key, seen): _of(item, seen) for key, item in value.items()}
  if type(value) in (list, tuple):
    return type(value)(_of(item, seen) for item in value)
  return _symbol(value) if allowed_symbols.is_symbol(value) else value


def _symbol(value: Any) -> Any:
  try:
    return Symbol(allowed_symbols.name_of(value))
  except UserError:
    return value
