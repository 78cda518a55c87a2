# SPDX-License-Identifier: Apache-2.0
"""The types of knobs in words, and the values to choose from."""

import enum
import math
import types
import typing
from typing import Any, Literal

from paxlike.config import dtypes
from paxlike.config.ranges import Dtype, OneOf, Range, Text, is_union, unranged
from paxlike.errors import did_you_mean


def name(kind: Any) -> str:
  """Returns the type as in an annotation, with its range: "int >= 1 | None"."""
  kind, bounds = unranged(kind)
  if isinstance(bounds, Range):
    return bounds.text(name(kind))
  if isinstance(bounds, OneOf):
    return f"{name(kind)} in ({', '.join(bounds.names)})"
  if isinstance(bounds, Text):
    return "non-empty str"
  if kind == Dtype:
    return "Dtype"
  if kind in (None, types.NoneType):
    return "None"
  if kind is ...:
    return "..."
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if is_union(kind):
    return " | ".join(map(name, args))
  if origin is Literal:
    return f"Literal[{', '.join(map(repr, args))}]"
  if isinstance(origin, type):
    return f"{origin.__name__}[{', '.join(map(name, args))}]"
  return kind.__name__ if isinstance(kind, type) else str(kind)


def choices_or_name(kind: Any) -> str:
  """Returns the choices of a Literal or an enum, "fp8 | int8 | None"; else `name`."""
  plain, bounds = unranged(kind)
  if bounds is None and is_union(plain):
    return " | ".join(map(choices_or_name, typing.get_args(plain)))
  is_any_dtype = bounds is None and plain == Dtype  # There are too many dtypes to list.
  return name(kind) if is_any_dtype else " | ".join(_names(kind)) or name(kind)


def expectation(kind: Any, value: Any = None) -> str:
  """Returns the accepted values of a type in words: "an int of at least 1 or None".

  Large upper bounds are included only if `value` exceeds them.
  """
  kind, bounds = unranged(kind)
  if isinstance(bounds, Range):
    is_too_large = _is_number(value) and float(value) > bounds.most
    return bounds.phrase(name(kind), bounded=is_too_large)
  if isinstance(bounds, OneOf):
    return f"one of {', '.join(bounds.names)}"
  if isinstance(bounds, Text):
    return bounds.phrase
  if kind == Dtype:
    return "a dtype such as bfloat16"
  if is_union(kind):
    words = [expectation(arg, value) for arg in typing.get_args(kind)]
    if any("whose" in one for one in words):
      return "; or ".join(words)
    return (", or " if any(", or " in one for one in words) else " or ").join(words)
  if choices := _names(kind):
    return f"one of {', '.join(choices)}"
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is dict:
    is_text = isinstance(unranged(args[0])[1], Text)
    each = "not empty" if is_text else f"each {_each(args[0])}"
    names = "" if args[0] is str else f"names are {each} and whose "
    return f"a mapping {{name: value, ...}} whose {names}values are each {_each(args[1])}"
  if origin is list or (origin is tuple and args[1:] == (...,)):
    return f"a list whose items are each {_each(args[0])}"
  if origin is tuple:
    return f"a list of {len(args)} items: {', '.join(map(_each, args))}"
  return name(kind)


def _each(kind: Any) -> str:
  """Returns an expectation for an item, with an article."""
  words = expectation(kind)
  return f"{'an' if words[0] in 'aeiou' else 'a'} {words}" if words.isidentifier() else words


def choices(kind: Any) -> list[Any]:
  """Returns the possible values of the bool, Literals and registered names in a type."""
  kind, bounds = unranged(kind)
  if isinstance(bounds, OneOf) and kind is str:
    return list(bounds.names)
  if kind is bool:
    return [True, False]
  args = typing.get_args(kind)
  if is_union(kind):
    return [value for arg in args for value in choices(arg)]
  return list(args) if typing.get_origin(kind) is Literal else []


def _names(kind: Any) -> list[str]:
  """Returns the names of a type's values, to suggest the nearest to a wrong one."""
  kind, bounds = unranged(kind)
  if isinstance(bounds, OneOf):
    return list(bounds.names)
  if kind == Dtype:
    return list(dtypes.NAMES)
  if is_union(kind):
    return [choice for arg in typing.get_args(kind) for choice in _names(arg)]
  if typing.get_origin(kind) is Literal:
    return [str(choice) for choice in typing.get_args(kind)]
  if isinstance(kind, type) and issubclass(kind, enum.Enum):
    return list(kind.__members__)
  return []


def hint(kind: Any, text: str) -> str:
  """Returns " Did you mean X?" for a text, or the first wrong item of a list, near a choice."""
  if names := _names(kind):
    return did_you_mean(text, names)
  names = [one for item in typing.get_args(kind) if item is not ... for one in _names(item)]
  items = [item.strip() for item in text.strip("[]()").split(",")]
  return "".join([did_you_mean(item, names) for item in items if item not in names][:1])


def _is_number(value: Any) -> bool:
  try:
    return not math.isnan(float(value))
  except (TypeError, ValueError, OverflowError):
    return False
