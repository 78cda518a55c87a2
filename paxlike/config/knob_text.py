# SPDX-License-Identifier: Apache-2.0
"""Command-line syntax of knob values: quotes, brackets, separators."""

import ast
import enum
import re
from collections.abc import Mapping
from typing import Any

_PAIRS = {"[": "]", "(": ")", "{": "}"}
_MOST_BRACKETS = 50
# A quoted string, or one character.
_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)


class RefusedError(ValueError):
  """A value is not of a type; the message has the expectation, the value and a suggestion."""


class MismatchError(Exception):
  """A value is not of a type, but another member of a union may accept it."""


def spell(value: Any) -> str:
  """Returns the text that sets a knob to `value` on the command line."""
  if isinstance(value, enum.Enum):
    return value.name
  if isinstance(value, tuple | list):
    return f"[{','.join(map(_spell_part, value))}]"
  if isinstance(value, dict):
    parts = (f"{_spell_part(key)}: {_spell_part(item)}" for key, item in value.items())
    return f"{{{', '.join(parts)}}}"
  text = str(value)
  needs_quotes = text != text.strip() or text.lower() == "none" or _is_quoted(text)
  return repr(text) if isinstance(value, str) and needs_quotes else text


def _spell_part(value: Any) -> str:
  plain = spell(value)
  if isinstance(value, str) and (not value or set(value) & set(",:[](){}'\"")):
    return repr(value)
  return plain


def pairs(knobs: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
  """Returns knobs given in Python as (name, text) pairs, as from a command line."""
  return tuple((n, v if isinstance(v, str) else spell(v)) for n, v in knobs.items())


def check_depth(text: str):
  """Raises RefusedError if brackets are nested too deeply."""
  depth = most = 0
  for character in text:
    depth += (character in _PAIRS) - (character in _PAIRS.values())
    most = max(most, depth)
  if most > _MOST_BRACKETS:
    raise RefusedError(f"expected at most {_MOST_BRACKETS} nested brackets.")


def _is_quoted(text: str) -> bool:
  return len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""


def unquoted(text: str) -> str:
  """Returns a text without its quotes, if it has any."""
  if not _is_quoted(text):
    return text
  try:
    return str(ast.literal_eval(text))
  except (ValueError, SyntaxError):
    return text[1:-1]


def split(text: str, separator: str = ",") -> list[str]:
  """Splits at separators outside of quotes and brackets; an empty last part is dropped.

  Raises:
    MismatchError: Brackets are unbalanced.
  """
  parts, closing = [""], []
  for token in _TOKEN.findall(text):
    if token in _PAIRS:
      closing.append(_PAIRS[token])
    elif token in _PAIRS.values() and (not closing or token != closing.pop()):
      raise MismatchError
    elif token == separator and not closing:
      parts.append("")
      continue
    parts[-1] += token
  if closing:
    raise MismatchError
  parts = [part.strip() for part in parts]
  return parts if parts[-1] else parts[:-1]


def is_enclosed(text: str) -> bool:
  """Returns whether the first bracket of `text` closes at its end."""
  depth = 0
  tokens = _TOKEN.findall(text)
  for index, token in enumerate(tokens):
    depth += (token in _PAIRS) - (token in _PAIRS.values())
    if depth == 0:
      return index == len(tokens) - 1 and token == _PAIRS[text[0]]
  return False
