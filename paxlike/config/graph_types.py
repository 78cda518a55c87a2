# SPDX-License-Identifier: Apache-2.0
"""Checks that a graph's arguments have the types and ranges of their parameters' annotations.

Knobs are checked when they are set. This checks arguments set directly: by path, by fiddlers, by
config files and by methods of experiments.
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

from paxlike.config import allowed_symbols, constructors, knob_types, type_words
from paxlike.errors import UserError

_GIVEN_BY_PARENTS = ("role", "over")
_LITERALS = (bool, int, float, str, bytes, types.NoneType)
# Possible values of a knob's annotation.
_MADE_OF_LITERALS = (*_LITERALS, tuple, list, dict, enum.Enum, np.generic, np.dtype)


def check(graph: Any):
  """Checks every argument in a graph against its annotation.

  Annotations other than literals, functions and classes are not checked.

  Raises:
    UserError: The first argument that does not fit, with its path, value and expectation; or a
      required argument is missing.
  """
  for path, node in nodes(graph):
    hints = annotations(fdl.get_callable(node))
    for name, value in node.__arguments__.items():
      if not isinstance(name, str):
        continue
      place = f"{path}.{name}" if path else name
      if (expected := misfit(hints.get(name, Any), value)) is not None:
        raise UserError(f"{place}={shown(value)}: expected {expected}.")
    if missing := _missing(node):
      raise UserError(f"{path or 'the graph'} lacks the required argument {missing}.")


@functools.cache
def annotations(target: Callable[..., Any]) -> dict[str, Any]:
  """Returns the resolved annotation of each parameter of a class or function, with its range."""
  try:
    if isinstance(target, type):
      return constructors.annotations(target)
    return typing.get_type_hints(target, include_extras=True)
  except (NameError, TypeError, AttributeError):
    # Some annotations may need imports under TYPE_CHECKING; skip those.
    parameters = inspect.signature(target).parameters.values()
    return {one.name: one.annotation for one in parameters if not isinstance(one.annotation, str)}


def misfit(annotation: Any, value: Any) -> str | None:
  """Returns what is expected instead of `value`; None if it fits or cannot be checked.

  A nested graph counts as the type that it builds.
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
      return type_words.expectation(annotation, value)
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
    return None if isinstance(value, annotation) else _instance_of(annotation)
  return None


def _made(graph: fdl.Buildable) -> type | None:
  """Returns the class that a nested graph builds; None if unknown."""
  if isinstance(graph, fdl.Partial):
    return functools.partial
  target = fdl.get_callable(graph)
  made = target if isinstance(target, type) else annotations(target).get("return")
  is_known = isinstance(made, type) and typing.get_origin(made) is None
  if not is_known or made in (Any, object) or getattr(made, "_is_protocol", False):
    return None
  return made


def _misfit_made(annotation: Any, made: type) -> str | None:
  """Like `misfit`, for an instance of the class `made`."""
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
    return None if issubclass(made, _MADE_OF_LITERALS) else type_words.expectation(annotation)
  if isinstance(annotation, type) and origin is None:
    # A function may return a subclass of its return annotation.
    fits = issubclass(made, annotation) or issubclass(annotation, made)
    return None if fits else _instance_of(annotation)
  return None


def _instance_of(cls: type) -> str:
  """Returns the expectation for a class as annotation, with its module if it is paxlike's."""
  if allowed_symbols.within(cls.__module__, ["paxlike"]):
    return f"a (subclass of) {cls.__module__}.{cls.__qualname__}"
  return cls.__name__


def _misfit_collection(origin: Any, args: tuple[Any, ...], value: Any) -> str | None:
  if not isinstance(value, origin) or isinstance(value, str):
    return "a list" if origin is collections.abc.Sequence else "a dict"
  items = value.values() if isinstance(value, dict) else value
  found = [misfit(args[-1], item) for item in items] if args else []
  wrong = next((one for one in found if one is not None), None)
  return None if wrong is None else f"{wrong} for each item"


def nodes(
  value: Any, path: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, fdl.Buildable]]:
  """Yields (path, node) of every node of a graph once, parents before children."""
  seen = set() if seen is None else seen
  if isinstance(value, fdl.Buildable | list | tuple | dict):
    if id(value) in seen:
      return
    seen.add(id(value))
  if isinstance(value, fdl.Buildable):
    yield path, value
    for name, item in value.__arguments__.items():
      step = f"[{name}]" if isinstance(name, int) else f".{name}" if path else name
      yield from nodes(item, f"{path}{step}", seen)
  elif isinstance(value, list | tuple):
    for index, item in enumerate(value):
      yield from nodes(item, f"{path}[{index}]", seen)
  elif isinstance(value, dict):
    for key, item in value.items():
      yield from nodes(item, f"{path}[{key!r}]", seen)


def _missing(node: fdl.Buildable) -> str | None:
  """Returns the first required argument that a node lacks; None if there is none.

  For a `Partial`, the parent passes positional arguments and some by name.
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
  """Returns literals as written and the type of anything else, truncated to a line."""
  text = _shown(value)
  return text if len(text) <= 100 else f"{text[:100]}..."


def _shown(value: Any) -> str:
  if isinstance(value, fdl.Buildable):
    return f"{type(value).__name__}[{allowed_symbols.short_name(fdl.get_callable(value))}]"
  if type(value) in (list, tuple):
    text = ", ".join(map(_shown, value))
    return f"[{text}]" if isinstance(value, list) else f"({text})"
  if type(value) is dict:
    return f"{{{', '.join(f'{_shown(key)}: {_shown(item)}' for key, item in value.items())}}}"
  if isinstance(value, (*_LITERALS, enum.Enum, np.generic, np.dtype)):
    return repr(value)
  if allowed_symbols.is_symbol(value):
    return allowed_symbols.short_name(value)
  return f"a {type(value).__name__}"
