# SPDX-License-Identifier: Apache-2.0
"""Whether the arguments of a graph are of the types and ranges that their parameters declare.

Knobs are checked as they are set. This is for what sets arguments directly: edits by path,
fiddlers, config files, and methods of experiments.
"""

import collections.abc
import enum
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import fiddle as fdl
import numpy as np

from paxlike import knob_types, symbols
from paxlike.errors import UserError

_GIVEN_BY_PARENTS = ("role", "over")
_LITERALS = (bool, int, float, str, bytes, types.NoneType)
# What a knob's annotation may mean.
_MADE_OF_LITERALS = (*_LITERALS, tuple, list, dict, enum.Enum, np.generic, np.dtype)


def check(graph: Any):
  """Checks every argument of every part of a graph against its annotation.

  What is annotated with something else than literals, functions and classes is left to whoever is
  called.

  Raises:
    UserError: The first that does not fit, with its path, its value and what is expected; or an
      argument that nothing gives.
  """
  for path, node in _nodes(graph, "", set()):
    hints = annotations(fdl.get_callable(node))
    for name, value in node.__arguments__.items():
      if not isinstance(name, str):
        continue
      place = f"{path}.{name}" if path else name
      if (expected := misfit(hints.get(name, Any), value)) is not None:
        raise UserError(f"{place}={shown(value)}: expected {expected}.")
    if missing := _missing(node):
      raise UserError(f"{path or 'the graph'} has no {missing}, without which it cannot be built.")


@functools.cache
def annotations(target: Callable[..., Any]) -> dict[str, Any]:
  """Returns the resolved annotation of each parameter of a class or function, with its range."""
  made_by = target.__init__ if isinstance(target, type) else target
  try:
    return typing.get_type_hints(made_by, include_extras=True)
  except (NameError, TypeError, AttributeError):
    # Others may name what only a type checker imports.
    parameters = inspect.signature(target).parameters.values()
    return {one.name: one.annotation for one in parameters if not isinstance(one.annotation, str)}


def misfit(annotation: Any, value: Any) -> str | None:
  """Returns what is expected instead of `value`; None if it fits, or that is not known.

  A nested graph stands for what it makes.
  """
  if annotation is Any or isinstance(value, os.PathLike):
    return None
  if isinstance(value, fdl.Buildable):
    made = _made(value)
    return None if made is None else _misfit_made(annotation, made)
  value = value.item() if isinstance(value, np.generic) else value
  if knob_types.is_supported(annotation) and annotation not in (tuple, list, dict):
    try:
      knob_types.convert(annotation, value, text=False)
    except knob_types.RefusedError:
      return knob_types.expectation(annotation, value)
    return None
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin in (typing.Union, types.UnionType):
    found = [misfit(arg, value) for arg in args]
    return None if None in found else " or ".join(filter(None, found))
  if origin is collections.abc.Callable:
    return None if callable(value) else "a function or a layer"
  if origin in (collections.abc.Sequence, collections.abc.Mapping):
    return _misfit_collection(origin, args, value)
  if isinstance(annotation, type) and isinstance(value, (*_LITERALS, tuple, list, dict)):
    if getattr(annotation, "_is_protocol", False):
      return None if callable(value) else "a function or a layer"
    return None if isinstance(value, annotation) else annotation.__name__
  return None


def _made(graph: fdl.Buildable) -> type | None:
  """Returns the class of what a nested graph makes, as far as that is known."""
  if isinstance(graph, fdl.Partial):
    return functools.partial
  target = fdl.get_callable(graph)
  made = target if isinstance(target, type) else annotations(target).get("return")
  is_known = isinstance(made, type) and typing.get_origin(made) is None
  if not is_known or made in (Any, object) or getattr(made, "_is_protocol", False):
    return None
  return made


def _misfit_made(annotation: Any, made: type) -> str | None:
  """Returns what is expected instead of an instance of a class; as `misfit`."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if annotation is Any:
    return None
  if origin in (typing.Union, types.UnionType):
    found = [_misfit_made(arg, made) for arg in args]
    return None if None in found else " or ".join(filter(None, found))
  is_protocol = isinstance(annotation, type) and getattr(annotation, "_is_protocol", False)
  if origin is collections.abc.Callable or is_protocol:
    is_called = any("__call__" in vars(base) for base in made.__mro__)
    return None if is_called else "a function or a layer"
  if origin in (collections.abc.Sequence, collections.abc.Mapping):
    words = "a list" if origin is collections.abc.Sequence else "a dict"
    return None if issubclass(made, origin) else words
  if knob_types.is_supported(annotation):
    return None if issubclass(made, _MADE_OF_LITERALS) else knob_types.expectation(annotation)
  if isinstance(annotation, type) and origin is None:
    # A function may return a subclass of what it says.
    fits = issubclass(made, annotation) or issubclass(annotation, made)
    return None if fits else annotation.__name__
  return None


def _misfit_collection(origin: Any, args: tuple[Any, ...], value: Any) -> str | None:
  if not isinstance(value, origin) or isinstance(value, str):
    return "a list" if origin is collections.abc.Sequence else "a dict"
  items = value.values() if isinstance(value, dict) else value
  found = [misfit(args[-1], item) for item in items] if args else []
  wrong = next((one for one in found if one is not None), None)
  return None if wrong is None else f"{wrong} at each place"


def _nodes(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, fdl.Buildable]]:
  """Yields every part of a graph once, with its path, those that hold others first."""
  if isinstance(value, fdl.Buildable | list | tuple | dict):
    if id(value) in seen:
      return
    seen.add(id(value))
  if isinstance(value, fdl.Buildable):
    yield path, value
    for name, item in value.__arguments__.items():
      step = f"[{name}]" if isinstance(name, int) else f".{name}" if path else name
      yield from _nodes(item, f"{path}{step}", seen)
  elif isinstance(value, list | tuple):
    for index, item in enumerate(value):
      yield from _nodes(item, f"{path}[{index}]", seen)
  elif isinstance(value, dict):
    for key, item in value.items():
      yield from _nodes(item, f"{path}[{key!r}]", seen)


def _missing(node: fdl.Buildable) -> str | None:
  """Returns the first argument without which a part cannot be made.

  For a `Partial`, the parent passes the positional arguments and some by name.
  """
  given = node.__arguments__
  positional = sum(isinstance(name, int) for name in given)
  for index, (name, parameter) in enumerate(node.__signature_info__.parameters.items()):
    is_one = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    is_given = name in given or index < positional
    if type(node) is not fdl.Config:
      is_given |= parameter.kind is not parameter.KEYWORD_ONLY or name in _GIVEN_BY_PARENTS
    if is_one and not is_given and parameter.default is parameter.empty:
      return name
  return None


def shown(value: Any) -> str:
  """Returns literals as they are written and of all else the type, cut to a line."""
  text = _shown(value)
  return text if len(text) <= 100 else f"{text[:100]}..."


def _shown(value: Any) -> str:
  if isinstance(value, fdl.Buildable):
    return f"{type(value).__name__}[{symbols.short_name(fdl.get_callable(value))}]"
  if type(value) in (list, tuple):
    text = ", ".join(map(_shown, value))
    return f"[{text}]" if isinstance(value, list) else f"({text})"
  if type(value) is dict:
    return f"{{{', '.join(f'{_shown(key)}: {_shown(item)}' for key, item in value.items())}}}"
  if isinstance(value, (*_LITERALS, enum.Enum, np.generic, np.dtype)):
    return repr(value)
  if symbols.is_symbol(value):
    return symbols.short_name(value)
  return f"a {type(value).__name__}"
