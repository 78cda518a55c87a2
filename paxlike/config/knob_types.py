# SPDX-License-Identifier: Apache-2.0
"""The types of knobs: conversion of a value or its command-line text.

Text needs no inner quotes: `bfloat16`, `[8,1,1]` or `8,1,1`, `{data: 2, fsdp: 4}`, `none`. Quoted
strings are accepted too.
"""

import enum
import math
import numbers
import types
import typing
from typing import Annotated, Any, Literal

from paxlike.config.knob_text import (
  MismatchError,
  RefusedError,
  check_depth,
  is_enclosed,
  split,
  unquoted,
)
from paxlike.config.ranges import Dtype, OneOf, Range, Text
from paxlike.errors import did_you_mean

DTYPES = (
  "bool",
  "int2",
  "int4",
  "int8",
  "int16",
  "int32",
  "int64",
  "uint2",
  "uint4",
  "uint8",
  "uint16",
  "uint32",
  "uint64",
  "float16",
  "bfloat16",
  "float32",
  "float64",
  "complex64",
  "complex128",
  "float4_e2m1fn",
  "float6_e2m3fn",
  "float6_e3m2fn",
  "float8_e3m4",
  "float8_e4m3",
  "float8_e4m3b11fnuz",
  "float8_e4m3fn",
  "float8_e4m3fnuz",
  "float8_e5m2",
  "float8_e5m2fnuz",
  "float8_e8m0fnu",
)
_DTYPE_ALIASES = {
  "bf16": "bfloat16",
  "f16": "float16",
  "fp16": "float16",
  "f32": "float32",
  "fp32": "float32",
  "f64": "float64",
}
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
    hint = _hint(kind, value) if isinstance(value, str) else ""
    raise RefusedError(f"expected {expectation(kind, value)}, got {_short(value)}.{hint}") from None


def _hint(kind: Any, text: str) -> str:
  """Returns " Did you mean X?" for a text, or the first wrong item of a list, near a choice."""
  if names := _choices(kind):
    return did_you_mean(text, names)
  names = [name for item in typing.get_args(kind) if item is not ... for name in _choices(item)]
  items = [item.strip() for item in text.strip("[]()").split(",")]
  return "".join([did_you_mean(item, names) for item in items if item not in names][:1])


def is_supported(kind: Any) -> bool:
  """Returns whether a knob may have this type."""
  kind, _ = _unranged(kind)
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if _is_dtype(kind) or kind in (int, float, bool, str, None, types.NoneType, tuple, list, dict):
    return True
  if origin is Literal:
    return all(isinstance(choice, str | int | None) for choice in args)
  if isinstance(kind, type) and origin is None:
    return issubclass(kind, enum.Enum)
  if _is_union(kind) or origin in (tuple, list, dict):
    return all(is_supported(arg) for arg in args if arg is not ...)
  return False


def type_name(kind: Any) -> str:
  """Returns the type as in an annotation, with its range: "int >= 1 | None"."""
  kind, bounds = _unranged(kind)
  if isinstance(bounds, Range):
    return bounds.text(type_name(kind))
  if isinstance(bounds, OneOf):
    return f"{type_name(kind)} in ({', '.join(bounds.names)})"
  if isinstance(bounds, Text):
    return "non-empty str"
  if _is_dtype(kind):
    return "Dtype"
  if kind in (None, types.NoneType):
    return "None"
  if kind is ...:
    return "..."
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if _is_union(kind):
    return " | ".join(map(type_name, args))
  if origin is Literal:
    return f"Literal[{', '.join(map(repr, args))}]"
  if isinstance(origin, type):
    return f"{origin.__name__}[{', '.join(map(type_name, args))}]"
  return kind.__name__ if isinstance(kind, type) else str(kind)


def choices_or_name(kind: Any) -> str:
  """Returns the choices of a Literal or an enum, "fp8 | int8 | None"; else `type_name`."""
  plain, bounds = _unranged(kind)
  if bounds is None and _is_union(plain):
    return " | ".join(map(choices_or_name, typing.get_args(plain)))
  is_any_dtype = bounds is None and _is_dtype(plain)  # There are too many dtypes to list.
  return type_name(kind) if is_any_dtype else " | ".join(_choices(kind)) or type_name(kind)


def expectation(kind: Any, value: Any = None) -> str:
  """Returns the accepted values of a type in words: "an int of at least 1 or None".

  Large upper bounds are included only if `value` exceeds them.
  """
  kind, bounds = _unranged(kind)
  if isinstance(bounds, Range):
    is_too_large = _is_number(value) and float(value) > bounds.most
    return bounds.phrase(type_name(kind), bounded=is_too_large)
  if isinstance(bounds, OneOf):
    return f"one of {', '.join(bounds.names)}"
  if isinstance(bounds, Text):
    return bounds.phrase
  if _is_dtype(kind):
    return "a dtype such as bfloat16"
  if _is_union(kind):
    words = [expectation(arg, value) for arg in typing.get_args(kind)]
    if any("whose" in one for one in words):
      return "; or ".join(words)
    return (", or " if any(", or " in one for one in words) else " or ").join(words)
  if choices := _choices(kind):
    return f"one of {', '.join(choices)}"
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin is dict:
    is_text = isinstance(_unranged(args[0])[1], Text)
    each = "not empty" if is_text else f"each {_each(args[0])}"
    names = "" if args[0] is str else f"names are {each} and whose "
    return f"a mapping {{name: value, ...}} whose {names}values are each {_each(args[1])}"
  if origin is list or (origin is tuple and args[1:] == (...,)):
    return f"a list whose items are each {_each(args[0])}"
  if origin is tuple:
    return f"a list of {len(args)} items: {', '.join(map(_each, args))}"
  return type_name(kind)


def _each(kind: Any) -> str:
  """Returns an expectation for an item, with an article."""
  words = expectation(kind)
  return f"{'an' if words[0] in 'aeiou' else 'a'} {words}" if words.isidentifier() else words


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


def _is_dtype(kind: Any) -> bool:
  return kind == Dtype


def _unranged(kind: Any) -> tuple[Any, Range | OneOf | Text | None]:
  """Returns a type without its range, and the range, if any."""
  if typing.get_origin(kind) is not Annotated:
    return kind, None
  plain, *marks = typing.get_args(kind)
  bounds = next((mark for mark in marks if isinstance(mark, Range | OneOf | Text)), None)
  return (Dtype if "dtype" in marks else plain), bounds


def _short(value: Any) -> str:
  """Returns a value's repr, truncated."""
  try:
    text = repr(value)
  except ValueError:  # Python does not convert an int of more than 4300 digits.
    return "an int of thousands of digits"
  return text if len(text) <= 200 else f"{text[:200]}..."


def _is_union(kind: Any) -> bool:
  return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _convert(kind: Any, value: Any, text: bool) -> Any:
  kind, bounds = _unranged(kind)
  if isinstance(bounds, OneOf) and kind is str:
    return _literal(tuple(bounds.names), value, text)
  if bounds is not None:
    converted = _convert(kind, value, text)
    if converted not in bounds:
      raise MismatchError
    return converted
  origin = typing.get_origin(kind) or kind
  if _is_dtype(kind):
    return _dtype(value)
  if _is_union(kind):
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
    kind, _ = _unranged(kind)
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


def _dtype(value: Any) -> str:
  if isinstance(value, str):
    name = unquoted(value).lower().rpartition(".")[2]
  elif isinstance(value, type):
    # jnp.bfloat16 carries its dtype; NumPy's scalar types are named after theirs.
    name = getattr(getattr(value, "dtype", None), "name", value.__name__)
  else:
    name = getattr(value, "name", None)
  name = _DTYPE_ALIASES.get(name, name) if isinstance(name, str) else None
  if name not in DTYPES:
    raise MismatchError
  return name


def choices(kind: Any) -> list[Any]:
  """Returns the possible values of the bool, Literals and registered names in a type."""
  kind, bounds = _unranged(kind)
  if isinstance(bounds, OneOf) and kind is str:
    return list(bounds.names)
  if kind is bool:
    return [True, False]
  args = typing.get_args(kind)
  if _is_union(kind):
    return [value for arg in args for value in choices(arg)]
  return list(args) if typing.get_origin(kind) is Literal else []


def _choices(kind: Any) -> list[str]:
  """Returns the names of a type's values, to suggest the nearest to a wrong one."""
  kind, bounds = _unranged(kind)
  if isinstance(bounds, OneOf):
    return list(bounds.names)
  if _is_dtype(kind):
    return list(DTYPES)
  if _is_union(kind):
    return [choice for arg in typing.get_args(kind) for choice in _choices(arg)]
  if typing.get_origin(kind) is Literal:
    return [str(choice) for choice in typing.get_args(kind)]
  if isinstance(kind, type) and issubclass(kind, enum.Enum):
    return list(kind.__members__)
  return []


def _is_number(value: Any) -> bool:
  try:
    return not math.isnan(float(value))
  except (TypeError, ValueError, OverflowError):
    return False
