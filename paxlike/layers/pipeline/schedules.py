# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: which chunk of which microbatch each stage computes in each tick.

S stages hold v chunks of layers each: chunk c of stage s is virtual stage c * S + s. All stages
advance in lockstep. In a tick a stage runs a forward chunk, a backward chunk, or one of each; then
activations shift to the next stage and cotangents to the previous one. A tick costs only the
halves (forward, backward) that some stage uses, so bubbles are as long as in an asynchronous
pipeline.

- gpipe (Huang et al., 2018, arXiv:1811.06965): all forwards, then all backwards.
- circular: gpipe with v chunks per stage; bubbles are v times shorter.
- 1f1b (Narayanan et al., 2019, arXiv:1806.03377): backwards begin as soon as the last stage has
  finished its first forward; stored activations do not grow with the number of microbatches.
- interleaved_1f1b (Narayanan et al., 2021, arXiv:2104.04473): 1f1b with v chunks per stage.

The 1F1B schedules are the eager variants: stage s runs 2 (S - 1 - s) forwards ahead, not S - 1 - s,
and stores as many, so that each transfer can overlap with a tick of compute.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

SCHEDULES = ("gpipe", "circular", "1f1b", "interleaved_1f1b")
_FORWARD, _BACKWARD = 1.0, 2.0  # Relative times of a microbatch in all chunks of a stage.

Item = tuple[int, int]  # (microbatch, chunk)


class Half(NamedTuple):
  """The forward or the backward work of all stages; int32 [ticks, S].

  Attributes:
    microbatch: Its index; -1 where the stage is idle.
    chunk: The chunk of the stage.
    slot: The slot that holds the residuals; -1: none.
  """

  microbatch: np.ndarray
  chunk: np.ndarray
  slot: np.ndarray


class Phase(NamedTuple):
  """Consecutive ticks in which the same halves are used; None: no stage uses that half."""

  forward: Half | None
  backward: Half | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
  """A schedule of one step.

  Attributes:
    name: One of `SCHEDULES`.
    stages: S.
    chunks: v; 1 except for circular and interleaved_1f1b.
    microbatches: M; a multiple of S if v > 1.
  """

  name: str
  stages: int
  chunks: int = 1
  microbatches: int

  @property
  def _forwards(self) -> list[Item]:
    """The order of a stage's forwards: in rounds of S microbatches, chunk by chunk."""
    if self.chunks == 1:
      return [(m, 0) for m in range(self.microbatches)]
    rounds = range(0, self.microbatches, self.stages)
    return [
      (first + i, c) for first in rounds for c in range(self.chunks) for i in range(self.stages)
    ]

  @property
  def _backwards(self) -> tuple[int, list[Item]]:
    """The tick of the last stage's first backward, and the order of a stage's backwards."""
    forwards = self._forwards
    if self.name in ("gpipe", "circular"):
      return len(forwards) + self.stages - 1, forwards[::-1]
    first = forwards.index((0, self.chunks - 1)) + self.stages - 1
    return first, [(m, self.chunks - 1 - c) for m, c in forwards]

  @functools.cached_property
  def _ticks(self) -> tuple[list[list[Item | None]], list[list[Item | None]]]:
    """The work of each stage in each tick, forward and backward."""
    S = self.stages
    first, backwards = self._backwards
    num_ticks = first + len(backwards) + S - 1
    forward: list[list[Item | None]] = [[None] * S for _ in range(num_ticks)]
    backward: list[list[Item | None]] = [[None] * S for _ in range(num_ticks)]
    for s in range(S):
      for k, item in enumerate(self._forwards):
        forward[k + s][s] = item
      for k, item in enumerate(backwards):
        backward[first + k + S - 1 - s][s] = item
    return forward, backward

  def _slots(self, stage: int) -> tuple[list[int], list[int]]:
    """Returns the slots that a stage writes and reads in each tick, -1: none.

    Freed slots are reused.
    """
    written, read, free, slot_of = [], [], [], {}
    for forward, backward in zip(*self._ticks, strict=True):
      slots = [-1, -1]
      for half, item in enumerate((forward[stage], backward[stage])):
        if item is None:
          continue
        if half == 0:
          slot_of[item] = free.pop() if free else len(slot_of)
          slots[0] = slot_of[item]
        else:
          slots[1] = slot_of.pop(item)
          free.append(slots[1])
      written.append(slots[0])
      read.append(slots[1])
    return written, read

  @property
  def num_slots(self) -> int:
    """The number of residual slots per stage."""
    return max(map(self.stored, range(self.stages)))

  def phases(self) -> Iterator[Phase]:
    """Yields the ticks of a step in phases."""
    slots = [self._slots(s) for s in range(self.stages)]
    halves = [
      (_half(items, [of[number] for of in slots]), [any(tick) for tick in items])
      for number, items in enumerate(self._ticks)
    ]
    (forward, has_forward), (backward, has_backward) = halves
    used = list(zip(has_forward, has_backward, strict=True))
    for (uses_forward, uses_backward), group in itertools.groupby(
      range(len(used)), used.__getitem__
    ):
      ticks = list(group)
      yield Phase(
        Half(*(x[ticks] for x in forward)) if uses_forward else None,
        Half(*(x[ticks] for x in backward)) if uses_backward else None,
      )

  @property
  def time(self) -> float:
    """The step time, in units of a stage's forward of a microbatch; a backward takes two units."""
    forward, backward = (sum(map(any, items)) for items in self._ticks)
    return (_FORWARD * forward + _BACKWARD * backward) / self.chunks

  @property
  def bubble(self) -> float:
    """The bubble fraction: the fraction of a step in which a stage is idle."""
    return 1 - self.microbatches * (_FORWARD + _BACKWARD) / self.time

  @property
  def chunk_share(self) -> float:
    """The fraction of its forward, or backward, ticks in which a stage runs a given chunk."""
    return (1 - self.bubble) / self.chunks

  def stored(self, stage: int) -> int:
    """Returns the peak number of chunks whose residuals a stage stores."""
    return 1 + max(self._slots(stage)[0])


def _half(items: list[list[Item | None]], slots: list[list[int]]) -> Half:
  pairs = np.array([[item or (-1, 0) for item in tick] for tick in items], np.int32)
  return Half(pairs[..., 0], pairs[..., 1], np.array(slots, np.int32).T)
