# SPDX-License-Identifier: Apache-2.0
"""Finds the repeated part of an irregular list of layers, so that a stack can scan over it."""

from collections.abc import Sequence
from typing import NamedTuple, Self


class Sections(NamedTuple):
  """Kinds of layers: `prologue + pattern * repeats + epilogue`, as in `Stack`."""

  prologue: tuple[str, ...]
  pattern: tuple[str, ...]
  repeats: int
  epilogue: tuple[str, ...]

  @classmethod
  def of(cls, kinds: Sequence[str]) -> Self:
    """Returns the sections with the fewest blocks, each repeat of the pattern being the same."""
    kinds, best = tuple(kinds), cls((), tuple(kinds), 1, ())
    for size in range(1, len(kinds) // 2 + 1):
      start = 0
      while start + 2 * size <= len(kinds):
        end = start + size
        while end < len(kinds) and kinds[end] == kinds[end - size]:
          end += 1
        repeats = (end - start) // size
        if (repeats - 1) * size > (best.repeats - 1) * len(best.pattern):
          after = start + repeats * size
          best = cls(kinds[:start], kinds[start : start + size], repeats, kinds[after:])
        start = max(start + 1, end - 2 * size + 1)
    return best

  @property
  def kinds(self) -> tuple[str, ...]:
    """The kind of each layer."""
    return self.prologue + self.pattern * self.repeats + self.epilogue

  def with_layers(self, num_layers: int) -> Self:
    """Returns sections of another number of layers, whose pattern is repeated more or less often.

    The first layers of the pattern make up for a remainder, before the epilogue. Fewer layers than
    prologue and epilogue have are the first ones.
    """
    ends = len(self.prologue) + len(self.epilogue)
    if num_layers < ends:
      return type(self)((), self.pattern, 0, self.kinds[:num_layers])
    repeats, rest = divmod(num_layers - ends, len(self.pattern))
    return self._replace(repeats=repeats, epilogue=self.pattern[:rest] + self.epilogue)
