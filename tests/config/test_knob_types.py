# SPDX-License-Identifier: Apache-2.0
"""Laws of the types of knobs, on types alone; test_knob_values.py has them on knobs."""

import collections.abc
import enum
from typing import Any, Literal, Optional, Union

import numpy as np
import pytest

from paxlike.config import knob_text, knob_types, ranges, type_words
from paxlike.config.ranges import Dtype


class Size(enum.Enum):
  SMALL = 1
  LARGE = 2


# Written with "|" it is an error to type checkers, outside of annotations.
DTYPE_OR_NONE = Optional[Dtype]  # noqa: UP045

TYPES = {
  "int": int,
  "float": float,
  "bool": bool,
  "str": str,
  "Dtype": Dtype,
  "Dtype | None": DTYPE_OR_NONE,
  "Size": Size,
  "int | None": int | None,
  "float | None": Optional[float],  # noqa: UP045
  "int | str": Union[int, str],  # noqa: UP007
  "Literal['a', 3, None]": Literal["a", 3, None],
  "tuple[int, ...]": tuple[int, ...],
  "tuple[int, str]": tuple[int, str],
  "tuple[tuple[int, ...], ...]": tuple[tuple[int, ...], ...],
  "list[float]": list[float],
  "list": list,
  "dict[str, int]": dict[str, int],
  "dict[str, tuple[int, ...]]": dict[str, tuple[int, ...]],
  "tuple[int, ...] | dict[str, int] | None": tuple[int, ...] | dict[str, int] | None,
}


@pytest.mark.parametrize("name", TYPES)
def test_supported_types_are_named_as_written(name):
  assert knob_types.is_supported(TYPES[name])
  assert type_words.name(TYPES[name]) == name


@pytest.mark.parametrize(
  ("kind", "text"),
  [
    (Literal["a", 3] | None, "a | 3 | None"),
    (Size | None, "SMALL | LARGE | None"),
    (ranges.ComputeDtype, "bfloat16 | float16 | float32"),
    (DTYPE_OR_NONE, "Dtype | None"),
    (ranges.Size | None, "1 <= int <= 16777216 | None"),
    (bool, "bool"),
    (tuple[int, ...] | dict[str, int], "tuple[int, ...] | dict[str, int]"),
  ],
)
def test_choices_are_written_out(kind, text):
  assert type_words.choices_or_name(kind) == text


@pytest.mark.parametrize(
  "kind", [Any, object, bytes, set[int], np.ndarray, type, collections.abc.Sequence[int], int | set]
)
def test_other_types_are_not_supported(kind):
  assert not knob_types.is_supported(kind)


@pytest.mark.parametrize(
  ("kind", "text", "value"),
  [
    (int | str, "3", 3),
    (int | str, "x", "x"),
    (str | int, "3", 3),
    (str | None, "none", None),
    (float | int, "3", 3),
    (float | int, "3.5", 3.5),
    (bool | int, "true", True),
    (tuple[str, ...] | str, "a,b", ("a", "b")),
    (dict[str, int] | tuple[int, ...] | int, "3", 3),
    (tuple[int, ...] | dict[str, int] | None, "{a: 1}", {"a": 1}),
    (tuple[int, str], "[1,x]", (1, "x")),
    (tuple[tuple[int, ...], ...], "[[1,2],[3],[]]", ((1, 2), (3,), ())),
    (dict[str, tuple[int, ...]], "{a: [1,2], b: []}", {"a": (1, 2), "b": ()}),
    (list, "[1, a, 2.5, true, none, [x], {k: 1}]", [1, "a", 2.5, True, None, ["x"], {"k": 1}]),
    (Literal["a", 3, None], "3", 3),
    (Literal["a", 3, None], "None", None),
    (Size | None, "small", Size.SMALL),
    (DTYPE_OR_NONE, "none", None),
    (DTYPE_OR_NONE, "int8", "int8"),
  ],
)
def test_text_is_read_by_the_narrowest_type_that_takes_it(kind, text, value):
  found = knob_types.convert(kind, text, text=True)
  assert found == value
  assert type(found) is type(value)


@pytest.mark.parametrize(
  ("kind", "text"),
  [
    (tuple[int, str], "[1]"),
    (tuple[int, str], "[1,x,2]"),
    (tuple[tuple[int, ...], ...], "[[1,[2]]"),
    (dict[str, tuple[int, ...]], "{a: [1,x]}"),
    (Literal["a", 3], "b"),
    (tuple[int, ...] | dict[str, int], "{a: b}"),
    (int | None, ""),
  ],
)
def test_text_that_no_type_takes_is_refused(kind, text):
  with pytest.raises(knob_types.RefusedError, match=r"expected .*, got "):
    knob_types.convert(kind, text, text=True)


@pytest.mark.parametrize(
  ("text", "value"),
  [("3", 3), ("3.5", 3.5), ("True", True), ("None", None), ("x y", "x y"), ("[1", "[1"), ("", "")],
)
def test_a_guess_never_fails(text, value):
  found = knob_types.guess(text)
  assert found == value
  assert type(found) is type(value)


VALUES = [
  None,
  True,
  0,
  -3,
  2.5,
  float("inf"),
  "plain",
  "",
  "a, b",
  "None",
  "'",
  ["x", 1],
  {"a": 1},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_spelling_is_undone_by_reading(value):
  kind = type(value) | None
  assert knob_types.convert(kind, knob_text.spell(value), text=True) == value


def test_python_values_are_not_parsed():
  with pytest.raises(knob_types.RefusedError):
    knob_types.convert(int, "3", text=False)
  assert knob_types.convert(str, " '3' ", text=False) == " '3' "
