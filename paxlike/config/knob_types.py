# SPDX-License-Identifier: Apache-2.0
"""The types of knobs: conversion of a value or its command-line text.

Text needs no inner quotes: `bfloat16`, `[8,1,1]` or `8,1,1`, `{data: 2, fsdp: 4}`, `none`. Quoted
strings are accepted too.
"""

import enum
import numbers
import types
import typing
from typing import Any, Literal

from paxlike.config import dtypes, type_words
from paxlike.config.knob_text import (
  MismatchError,
  RefusedError,
  check_depth,
  is_enclosed,
  split,
  unquoted,
)
from paxlike.config.ranges import Dtype, OneOf, is_union, unranged

_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def convert(kind: Any, value: Any, *, text: bool) -> Any:
  """Returns `value` as a `kind`.

  Args:
    kind: A type for which `is_supported` holds.
    value: A Python value, or text.
    text: Whether `value` is text to parse.

  Raises:
    RefusedError: `value` is not a `kind`.
  """
  if text:
    check_depth(value)
  try:
    return _convert(kind, value.strip() if text else value, text)
  except MismatchError:
    hint = type_words.hint(kind, value) if isinstance(value, str) else ""
    expected = type_words.expectation(kind, value)
    raise RefusedError(f"expected {expected}, got {_short(value)}.{hint}") from None


def is_supported(kind: Any) -> bool:
  """Returns whether a knob may have this type."""
  kind, _ = unranged(kind)
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if kind == Dtype or kind in (int, float, bool, str, None, types.NoneType, tuple, list, dict):
    return True
  if origin is Literal:
    return all(isinstance(choice, str | int | None) for choice in args)
  if isinstance(kind, type) and origin is None:
    return issubclass(kind, enum.Enum)
  if is_union(kind) or origin in (tuple, list, dict):
    return all(is_supported(arg) for arg in args if arg is not ...)
  return False


def guess(text: str) -> Any:
  """Returns the value of text of unknown type: a literal if possible, else a str.

  Raises:
    RefusedError: Its brackets are nested too deeply.
  """
  check_depth(text)
  text = text.strip()
  kinds = (types.NoneType, int, bool, float, str)
  kind = {"[": list, "(": list, "{": dict}.get(text[:1])
  try:
    return _union(kinds, text, True) if kind is None else _convert(kind, text, True)
  except MismatchError:
    return text


def _short(value: Any) -> str:
  """Returns a value's repr, truncated."""
  try:
    text = repr(value)
  except ValueError:  # Python does not convert an int of more than 4300 digits.
    return "an int of thousands of digits"
  return text if len(text) <= 200 else f"{text[:200]}..."


def _convert(kind: Any, value: Any, text: bool) -> Any:
  kind, bounds = unranged(kind)
  if isinstance(bounds, OneOf) and kind is str:
    return _literal(tuple(bounds.names), value, text)
  if bounds is not None:
    converted = _convert(kind, value, text)
    if converted not in bounds:
      raise MismatchError
    return converted
  origin = typing.get_origin(kind) or kind
  if kind == Dtype:
    if (name := dtypes.name(value)) is None:
      raise MismatchError
    return name
  if is_union(kind):
    return _union(typing.get_args(kind), value, text)
  if origin in (tuple, list):
    return _sequence(origin, typing.get_args(kind), value, text)
  if origin is dict:
    return _mapping(typing.get_args(kind), value, text)
  if origin is Literal:
    return _literal(typing.get_args(kind), value, text)
  if isinstance(kind, type) and issubclass(kind, enum.Enum):
    return _enum(kind, value)
  if kind in (None, types.NoneType):
    if value is None or (text and value.lower() == "none"):
      return None
    raise MismatchError
  return _scalar(kind, value, text)


def _scalar(kind: type, value: Any, text: bool) -> Any:
  if kind is str and isinstance(value, str):
    return unquoted(value) if text else value
  if kind is bool and isinstance(value, bool):
    return value
  if kind is bool and text and value.lower() in _BOOLS:
    return _BOOLS[value.lower()]
  # These ABCs include NumPy's scalars.
  numeric: Any = numbers.Integral if kind is int else numbers.Real
  if kind in (int, float) and (text or isinstance(value, numeric)):
    try:
      number = kind(value)
    except (ValueError, OverflowError):
      raise MismatchError from None
    # NaN is rejected; math.isnan would fail for large ints.
    if not isinstance(value, bool) and number == number:
      return number
  raise MismatchError


def _union(kinds: tuple[Any, ...], value: Any, text: bool) -> Any:
  # Narrow types first: any text is a str, and any int is a float.
  def breadth(kind: Any) -> int:
    kind, _ = unranged(kind)
    if kind is types.NoneType:
      return 0
    origin = typing.get_origin(kind) or kind
    return {float: 2, tuple: 3, list: 3, str: 4}.get(origin, 1)

  for kind in sorted(kinds, key=breadth):
    try:
      return _convert(kind, value, text)
    except MismatchError:
      pass
  raise MismatchError


def _sequence(origin: type, kinds: tuple[Any, ...], value: Any, text: bool) -> Any:
  if text:
    if not value or value[0] == "{":
      raise MismatchError
    items = split(value[1:-1] if value[0] in "[(" and is_enclosed(value) else value)
  elif isinstance(value, tuple | list):
    items = list(value)
  else:
    raise MismatchError
  if not kinds:
    return origin(guess(item) if text else item for item in items)
  if origin is list or kinds[1:] == (...,):
    kinds = kinds[:1] * len(items)
  if len(kinds) != len(items):
    raise MismatchError
  return origin(_convert(kind, item, text) for kind, item in zip(kinds, items, strict=True))


def _mapping(kinds: tuple[Any, ...], value: Any, text: bool) -> dict[Any, Any]:
  if text:
    if not (value.startswith("{") and is_enclosed(value)):
      raise MismatchError
    pairs = []
    for item in split(value[1:-1]):
      key, *rest = split(item, separator=":")
      if len(rest) != 1:
        raise MismatchError
      pairs.append((key, rest[0]))
  elif isinstance(value, dict):
    pairs = list(value.items())
  else:
    raise MismatchError
  if kinds:
    pairs = [(_convert(kinds[0], k, text), _convert(kinds[1], v, text)) for k, v in pairs]
  elif text:
    pairs = [(guess(k), guess(v)) for k, v in pairs]
  if len(dict(pairs)) != len(pairs):
    raise MismatchError
  return dict(pairs)


def _literal(choices: tuple[Any, ...], value: Any, text: bool) -> Any:
  for choice in choices:
    if text and str(choice).lower() == unquoted(value).lower():
      return choice
    if not text and choice == value and type(choice) is type(value):
      return choice
  raise MismatchError


def _enum(kind: type[enum.Enum], value: Any) -> enum.Enum:
  if isinstance(value, kind):
    return value
  if isinstance(value, str):
    name = unquoted(value).removeprefix(f"{kind.__name__}.")
    for member in kind.__members__:
      if member.lower() == name.lower():
        return kind[member]
  raise MismatchError
