# SPDX-License-Identifier: Apache-2.0
"""Ranges of numbers, declared once in the annotation of a knob or an argument.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Range:
  """The numbers between bounds.

  Attributes:
    least: The smallest.
    above: Instead of `least`, a bound that is not one of them itself.
    most: The largest.
    below: Instead of `most`, a bound that is not one of them itself.
    also: Numbers outside of the bounds that mean something else, such as -1.
  """

  least: float = -math.inf
  above: float = -math.inf
  most: float = math.inf
  below: float = math.inf
  also: tuple[int, ...] = ()

  def __contains__(self, number: float) -> bool:
    inside = self.least <= number <= self.most and self.above < number < self.below
    return inside or number in self.also

  def text(self, kind: str) -> str:
    """Returns the range as a condition on a `kind`: "int >= 1", "0 <= float < 1"."""
    lower = f"{self.least:.15g} <= " if math.isfinite(self.least) else ""
    lower = f"{self.above:.15g} < " if math.isfinite(self.above) else lower
    upper = f" <= {self.most:.15g}" if math.isfinite(self.most) else ""
    upper = f" < {self.below:.15g}" if math.isfinite(self.below) else upper
    if self.most in (INT32, FLOAT32):
      bound, is_open = (self.above, True) if math.isfinite(self.above) else (self.least, False)
      lower, upper = "", f" {'>' if is_open else '>='} {bound:.15g}"
      upper = "" if bound == -FLOAT32 else upper
    or_one_of = "".join(f" or {number}" for number in self.also)
    return f"{lower}{kind}{upper}{or_one_of}"

  def phrase(self, kind: str, *, bounded: bool = False) -> str:
    """Returns what is expected, in words: "an int of at least 1", "a finite float above 0".

    Large upper bounds, which are there against slips, are spelt only if `bounded`.
    """
    words = []
    if self.most == FLOAT32 and not bounded:
      kind = f"finite {kind}"
    shown = math.isfinite(self.most) and (bounded or self.most < 1000)
    if math.isfinite(self.least) and self.least != -FLOAT32:
      words.append(f"from {self.least:.15g}" if shown else f"of at least {self.least:.15g}")
    if math.isfinite(self.above):
      words.append(f"above {self.above:.15g}")
    if shown:
      words.append(f"{'to' if words and 'from' in words[0] else 'of at most'} {self.most:.15g}")
    if math.isfinite(self.below):
      words.append(f"below {self.below:.15g}")
    joined = " ".join(words) if shown and "from" in words[0] else " and ".join(words)
    or_one_of = "".join(f", or {number}" for number in self.also)
    return f"{'an' if kind == 'int' else 'a'} {kind} {joined}".rstrip() + or_one_of


@dataclasses.dataclass(frozen=True)
class OneOf:
  """Some of the names of a type: of all dtypes, those to compute in."""

  names: tuple[str, ...]

  def __contains__(self, name: Any) -> bool:
    return name in self.names


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
PositiveFloat = Annotated[float, Range(above=0, most=FLOAT32)]
NonNegativeFloat = Annotated[float, Range(least=0, most=FLOAT32)]
# Weights of losses, rates and scales: beyond them everything overflows in a few steps.
Weight = Annotated[float, Range(least=0, most=1000)]
Factor = Annotated[float, Range(above=0, most=1e6)]
# Sequences of a device; each is made in Python.
Batch = Annotated[float, Range(above=0, most=2**16)]
# Places of experts, in memory, over those needed.
Capacity = Annotated[float, Range(above=0, most=1024)]
Stretch = Annotated[float, Range(least=1, most=1e6)]
# Divides logits; 0 takes the likeliest token.
Temperature = Annotated[float, Range(least=1e-3, most=1e3, also=(0,))]
# A limit of time that may be none, and the time between two events.
Seconds = Annotated[float, Range(least=0, most=1e9)]
Interval = Annotated[float, Range(least=1, most=1e9)]
Fraction = Annotated[float, Range(least=0, most=1)]
Share = Annotated[float, Range(above=0, most=1)]
Probability = Annotated[float, Range(least=0, below=1)]
# How probable it is that a preference is the wrong way round: above 1/2 it would be the right one.
Smoothing = Annotated[float, Range(least=0, below=0.5)]
# Of the wave lengths of rotary positions.
Base = Annotated[float, Range(above=1, most=1e15)]
# Of logits: x becomes cap * tanh(x / cap).
Cap = Annotated[float, Range(least=1e-3, most=1e6)]
# Of distances: half of them are of one distance each.
Buckets = Annotated[int, Range(least=2, most=2**16)]
# In float32 a smaller one would be zero, and 0 / 0 no number.
Epsilon = Annotated[float, Range(least=1e-30, most=1)]
