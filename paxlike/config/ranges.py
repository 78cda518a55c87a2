# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers and strings, declared in the annotation of a knob or an argument.

    NUM_LAYERS: ranges.Depth = 12
    def __init__(self, *, rate: ranges.Probability): ...

`knob_types` checks them and `type_words` spells them. Plain Python calls are not checked; to type
checkers, these are int, float and str.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Collection
from typing import Annotated, Any

INT32 = 2**31 - 1
FLOAT32 = 3.4028234e38
TINY = 1e-30  # Smaller positive numbers may round to 0 in float32.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """A closed range of numbers.

  There are no open bounds: in float32, a number just inside of one may round to the bound.

  Attributes:
    least: The smallest number.
    most: The largest number.
    also: Numbers outside of the range with a special meaning, such as -1.
  """

  least: float = -math.inf
  most: float = math.inf
  also: tuple[int, ...] = ()

  def __contains__(self, number: float) -> bool:
    return self.least <= number <= self.most or number in self.also

  def text(self, kind: str) -> str:
    """Returns the range as a condition on a `kind`: "int >= 1", "0 <= float <= 1"."""
    lower = f"{self.least:.15g} <= " if math.isfinite(self.least) else ""
    upper = f" <= {self.most:.15g}" if math.isfinite(self.most) else ""
    if self.most in (INT32, FLOAT32):
      lower, upper = "", "" if self.least == -FLOAT32 else f" >= {self.least:.15g}"
    or_one_of = "".join(f" or {number}" for number in self.also)
    return f"{lower}{kind}{upper}{or_one_of}"

  def phrase(self, kind: str, *, bounded: bool = False) -> str:
    """Returns the range in words: "an int of at least 1", "a float from 0 to 1".

    Large upper bounds, which only catch mistakes, are included only if `bounded`.
    """
    words = []
    if self.most == FLOAT32 and not bounded:
      kind = f"finite {kind}"
    shown = math.isfinite(self.most) and (bounded or self.most < 1000)
    if math.isfinite(self.least) and self.least != -FLOAT32:
      words.append(f"from {self.least:.15g}" if shown else f"of at least {self.least:.15g}")
    if shown:
      words.append(f"{'to' if words and 'from' in words[0] else 'of at most'} {self.most:.15g}")
    or_one_of = "".join(f", or {number}" for number in self.also)
    return f"{'an' if kind == 'int' else 'a'} {kind} {' '.join(words)}".rstrip() + or_one_of


@dataclasses.dataclass(frozen=True, eq=False)
class OneOf:
  """A choice of names, such as the dtypes to compute in, or the keys of a registry."""

  names: Collection[str]

  def __contains__(self, name: Any) -> bool:
    return name in self.names


@dataclasses.dataclass(frozen=True)
class Text:
  """Non-empty strings: "" as a path would be the working directory."""

  phrase: str

  def __contains__(self, text: str) -> bool:
    return bool(text.strip())


# Path: a file, folder, glob or URL. Name: of a field, split, metric and the like.
Path = Annotated[str, Text("a path that is not empty")]
Name = Annotated[str, Text("a name that is not empty")]

# A dtype by name; also accepts NumPy dtypes and jnp.bfloat16.
Dtype = Annotated[Any, "dtype"]
ComputeDtype = Annotated[Dtype, OneOf(("bfloat16", "float16", "float32"))]

# Steps, seeds and other values that are int32 in programs.
Positive = Annotated[int, Range(least=1, most=INT32)]
NonNegative = Annotated[int, Range(least=0, most=INT32)]
# A port that programs of users may listen at.
Port = Annotated[int, Range(least=1024, most=65535)]
# One dim of a tensor, at most 16 million: a larger one is a mistake, and would hang before failing.
Size = Annotated[int, Range(least=1, most=2**24)]
# Numbers of layers; each layer is built as Python objects.
MOST_LAYERS = 1024
Depth = Annotated[int, Range(least=1, most=MOST_LAYERS)]
Repeats = Annotated[int, Range(least=0, most=MOST_LAYERS)]
# Size of a mesh axis; -1: the remaining devices.
AxisSize = Annotated[int, Range(least=1, most=2**20, also=(-1,))]

Finite = Annotated[float, Range(least=-FLOAT32, most=FLOAT32)]
PositiveFloat = Annotated[float, Range(least=TINY, most=FLOAT32)]
NonNegativeFloat = Annotated[float, Range(least=0, most=FLOAT32)]
# Weights of losses, and scales: larger ones overflow in a few steps.
Weight = Annotated[float, Range(least=0, most=1000)]
Factor = Annotated[float, Range(least=TINY, most=1e6)]
# Learning rate; 0: no training.
Rate = Annotated[float, Range(least=TINY, most=1000, also=(0,))]
# Sequences per device; each is assembled in Python.
Batch = Annotated[float, Range(least=1e-6, most=2**16)]
# Capacity factor of experts.
Capacity = Annotated[float, Range(least=1e-6, most=1024)]
# Factor by which the scaling of rotary positions extends the context.
Stretch = Annotated[float, Range(least=1, most=1e6)]
# Sampling temperature; 0: greedy.
Temperature = Annotated[float, Range(least=1e-3, most=1e3, also=(0,))]
# Seconds: a time-out; 0: none. Interval: seconds between two events.
Seconds = Annotated[float, Range(least=1, most=1e9, also=(0,))]
Interval = Annotated[float, Range(least=1, most=1e9)]
Fraction = Annotated[float, Range(least=0, most=1)]
# A fraction that is not 0.
Share = Annotated[float, Range(least=TINY, most=1)]
# Dropout rate, decay of a moving average: 1 would divide by 0.
Probability = Annotated[float, Range(least=0, most=0.9999999)]
# Probability that a preference pair is swapped (label smoothing), below 1/2.
Smoothing = Annotated[float, Range(least=0, most=0.4999999)]
# Base of the wave lengths of rotary position embeddings.
Base = Annotated[float, Range(least=1.0001, most=1e15)]
# Soft cap of logits: cap * tanh(x / cap).
Cap = Annotated[float, Range(least=1e-3, most=1e6)]
# Buckets of relative distances: half of them hold a single distance each.
Buckets = Annotated[int, Range(least=2, most=2**16)]
# Added to divisors, against 0 / 0.
Epsilon = Annotated[float, Range(least=TINY, most=1)]


def unranged(kind: Any) -> tuple[Any, Range | OneOf | Text | None]:
  """Returns a type without its range, and the range, if any."""
  if typing.get_origin(kind) is not Annotated:
    return kind, None
  plain, *marks = typing.get_args(kind)
  bounds = next((mark for mark in marks if isinstance(mark, Range | OneOf | Text)), None)
  return (Dtype if "dtype" in marks else plain), bounds


def is_union(kind: Any) -> bool:
  """Returns whether a type is a union, with or without `typing.Union`."""
  return typing.get_origin(kind) in (typing.Union, types.UnionType)
