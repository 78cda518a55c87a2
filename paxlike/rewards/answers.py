# SPDX-License-Identifier: Apache-2.0
"""Rewards of answers that are right or wrong."""

import fractions
import re
from collections.abc import Mapping
from typing import Any

from paxlike.config.configurable import configurable
from paxlike.errors import UserError

_NUMBER = re.compile(r"-?(?:\d[\d,]*)?\.?\d+(?:/\d+)?")
_MARK = re.compile(r"\\boxed\{|####")
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]+)\}\{([^{}]+)\}|(\d)(\d)(?!\d))")
_MIXED = re.compile(r"(-?)(\d+)(?: +|(?=\\[dt]?frac))(\S+)")
_UNIT = re.compile(r"(?<=[\d}])\s*\\text\{[^{}]*\}$")
_SPACING = re.compile(r"\\[,;:! ]|\\left|\\right|\\?\$|\s|\^\\circ|\\%|%")
_POWER = re.compile(r"(\d+)\^(\d{1,3}|\{\d{1,3}\})")
_MOST_CHARACTERS = 200  # Of an answer that is read as a number.


@configurable
class ExactAnswer:
  """1 if the answer is the record's `answer`, apart from white space at both ends; else 0."""

  def __call__(self, answer: str, record: Mapping[str, Any]) -> float:
    """Returns the reward."""
    return float(answer.strip() == _expected(record).strip())


@configurable
class MathAnswer:
  r"""1 if the final answer equals that of the record's `answer`; else 0.

  The final answer of a text is what stands in its last `\boxed{}`, else after its last "####". In a
  text with neither, it is the last number or, of a record, the whole text. Two final answers are
  equal if they are the same number, written as a decimal, with thousands separators, as a fraction,
  in LaTeX, or followed by a percent sign or a unit in `\text{}`, or else the same text without
  white space, dollar signs and LaTeX's spacing.
  """

  def __call__(self, answer: str, record: Mapping[str, Any]) -> float:
    """Returns the reward."""
    given, expected = final_answer(answer), _expected(record)
    if _MARK.search(expected):
      expected = final_answer(expected)
    if not given or not expected:
      return 0.0
    return float(_normal(given) == _normal(expected))


def final_answer(text: str) -> str | None:
  """Returns the final answer in an answer, see `MathAnswer`; None if it has none."""
  start = text.rfind("\\boxed{")
  if start >= 0:
    depth, first = 0, start + len("\\boxed")
    for place in range(first, len(text)):
      depth += {"{": 1, "}": -1}.get(text[place], 0)
      if not depth:
        return text[first + 1 : place]
    return None
  _, marker, rest = text.rpartition("####")
  if marker:
    return next(iter(rest.strip().splitlines()), None)
  numbers = _NUMBER.findall(text)
  return numbers[-1] if numbers else None


def _normal(answer: str) -> fractions.Fraction | str:
  """Returns the number that an answer is, else its text without spacing."""
  text = _UNIT.sub("", answer.strip().strip("$").strip())
  if mixed := _MIXED.fullmatch(text):
    sign, whole, part = mixed.groups()
    number = _number(part)
    if number is not None and 0 <= number < 1:
      return (number + int(whole)) * (-1 if sign else 1)
  number = _number(text)
  return _SPACING.sub("", text) if number is None else number


def _number(text: str) -> fractions.Fraction | None:
  text = _SPACING.sub("", text).rstrip(".")
  text = _FRACTION.sub(r"\1\3/\2\4", text).replace("{,}", "").removeprefix("+")
  text = re.sub(r",(?=\d{3}(?!\d))", "", text)
  if len(text) > _MOST_CHARACTERS or "e" in text.lower():
    return None
  if power := _POWER.fullmatch(text):
    return fractions.Fraction(int(power[1]) ** int(power[2].strip("{}")))
  try:
    return fractions.Fraction(text)
  except (ValueError, ZeroDivisionError):
    return None


def _expected(record: Mapping[str, Any]) -> str:
  expected = record.get("answer")
  if not isinstance(expected, str | int | float):
    there = ", ".join(record)
    raise UserError(f"the record has no `answer` to compare with. It has: {there}.")
  return str(expected)
