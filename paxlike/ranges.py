# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers and texts, declared once in the annotation of a knob or an argument.

    NUM_LAYERS: ranges.Depth = 12
    def __init__(self, *, rate: ranges.Probability): ...

`knob_types` checks values against them and spells them. Nothing is checked where plain Python calls
a function: a type checker sees the int or float alone.
"""

import dataclasses
import math
from typing import Annotated, Any

INT32 = 2**31 - 1
FLOAT32 = 3.4028234e38
TINY = 1e-30  # In float32 a smaller number may be 0, which is not positive.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers between bounds, which are of them.

  There are no open bounds: programs hold floats as float32, in which a number just inside of one
  may be the bound itself.

  Attributes:
    least: The smallest.
    most: The largest.
    also: Numbers outside of the bounds that mean something else, such as -1.
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
    """Returns what is expected, in words: "an int of at least 1", "a float from 0 to 1".

    Large upper bounds, which are there against slips, are spelt only if `bounded`.
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


@dataclasses.dataclass(frozen=True)
class OneOf:
  """Some of the names of a type: of all dtypes, those to compute in."""

  names: tuple[str, ...]

  def __contains__(self, name: Any) -> bool:
    return name in self.names


@dataclasses.dataclass(frozen=True)
class Text:
  """Texts that are not empty: "" as a path would be the working directory."""

  phrase: str

  def __contains__(self, text: str) -> bool:
    return bool(text.strip())


# Of a file or a folder, a glob or a URL; and of what else has a name: a field, a split, a metric.
Path = Annotated[str, Text("a path that is not empty")]
Name = Annotated[str, Text("a name that is not empty")]

# Marks the name of a dtype. Takes names, NumPy dtypes and jnp.bfloat16 alike.
Dtype = Annotated[Any, "dtype"]
ComputeDtype = Annotated[Dtype, OneOf(("bfloat16", "float16", "float32"))]

# Steps, seeds and the like, which programs hold as int32.
Positive = Annotated[int, Range(least=1, most=INT32)]
NonNegative = Annotated[int, Range(least=0, most=INT32)]
# Of one dim of a tensor: 16 million. What is larger is a slip, and would hang before it fails.
Size = Annotated[int, Range(least=1, most=2**24)]
# Layers, each of which becomes Python objects.
MOST_LAYERS = 1024
Depth = Annotated[int, Range(least=1, most=MOST_LAYERS)]
Repeats = Annotated[int, Range(least=0, most=MOST_LAYERS)]
# Of a mesh: -1 fills an axis.
AxisSize = Annotated[int, Range(least=1, most=2**20, also=(-1,))]

Finite = Annotated[float, Range(least=-FLOAT32, most=FLOAT32)]
PositiveFloat = Annotated[float, Range(least=TINY, most=FLOAT32)]
NonNegativeFloat = Annotated[float, Range(least=0, most=FLOAT32)]
# Weights of losses and scales: beyond them everything overflows in a few steps.
Weight = Annotated[float, Range(least=0, most=1000)]
Factor = Annotated[float, Range(least=TINY, most=1e6)]
# Of learning; 0 trains nothing.
Rate = Annotated[float, Range(least=TINY, most=1000, also=(0,))]
# Sequences of a device; each is made in Python.
Batch = Annotated[float, Range(least=1e-6, most=2**16)]
# Places of experts, in memory, over those needed.
Capacity = Annotated[float, Range(least=1e-6, most=1024)]
Stretch = Annotated[float, Range(least=1, most=1e6)]
# Divides logits; 0 takes the likeliest token.
Temperature = Annotated[float, Range(least=1e-3, most=1e3, also=(0,))]
# A limit of time, of which 0 is none, and the time between two events.
Seconds = Annotated[float, Range(least=1, most=1e9, also=(0,))]
Interval = Annotated[float, Range(least=1, most=1e9)]
Fraction = Annotated[float, Range(least=0, most=1)]
Share = Annotated[float, Range(least=TINY, most=1)]
# Of what is dropped, and of what a mean keeps: 1 divides by 0.
Probability = Annotated[float, Range(least=0, most=0.9999999)]
# How probable it is that a preference is the wrong way round: above 1/2 it would be the right one.
Smoothing = Annotated[float, Range(least=0, most=0.4999999)]
# Of the wave lengths of rotary positions.
Base = Annotated[float, Range(least=1.0001, most=1e15)]
# Of logits: x becomes cap * tanh(x / cap).
Cap = Annotated[float, Range(least=1e-3, most=1e6)]
# Of distances: half of them are of one distance each.
Buckets = Annotated[int, Range(least=2, most=2**16)]
# Added to what divides: 0 / 0 is no number.
Epsilon = Annotated[float, Range(least=TINY, most=1)]
