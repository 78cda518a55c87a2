# SPDX-License-Identifier: Apache-2.0
"""The batches of a run's steps, over its stages, and the positions in the data after them."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from paxlike.data.dataset import Batch, Batches
from paxlike.training.ramp import Stage

_REMEMBERED = 16  # More than the steps in flight.


class TrainInput:
  """The batches of the steps of a run, from one of them on; a context that closes the data.

  Attributes:
    stage: The index of the stage of the next step.
  """

  def __init__(
    self, stages: Sequence[Stage], *, step: int, position: dict[str, Any] | None, seen: int
  ):
    """Begins with `step`, after a position in the data; None: with the first sequence.

    `seen` is the least number of batches before the position, by which damage is noticed.
    """
    self._stages = stages
    self._skipped = seen - step
    self._step = step
    self._positions = collections.deque([(step - 1, position)], maxlen=_REMEMBERED)
    self._first: Batch | None = None
    self.stage = next(n for n, stage in enumerate(stages) if step < stage.end)
    self._batches: Batches | None = None
    self._names: list[str] = []

  def open(self):
    """Loads the first batch, so that faults of the data appear."""
    self._batches = self._opened()
    self._first = next(self._batches)

  def next(self) -> Batch:
    """Returns the batch of the next step."""
    assert self._batches is not None
    batch, self._first = self._first or next(self._batches), None
    self._positions.append((self._step, batch.state))
    self._step += 1
    return batch._replace(arrays={name: batch.arrays[name] for name in self._names})

  def following(self) -> Mapping[str, np.ndarray]:
    """Returns the arrays of the batch that `next` will return."""
    assert self._batches is not None
    self._first = self._first or next(self._batches)
    return {name: self._first.arrays[name] for name in self._names}

  def enters_stage(self) -> bool:
    """Moves on to the stage of the next step; returns whether that is another one."""
    if self._step < self._stages[self.stage].end:
      return False
    self.stage += 1
    self.__exit__()
    self._batches = self._opened()
    return True

  def position(self, step: int) -> dict[str, Any]:
    """Returns the position in the data after the batch of `step`, one of the last steps."""
    position = dict(self._positions)[step]
    assert position is not None
    return position

  def _opened(self) -> Batches:
    trainer = self._stages[self.stage].trainer
    self._names = list(trainer.data.no_rows())  # Without wrong answers, which training ignores.
    step, position = self._positions[-1]
    return trainer.batches(state=position, updates=step + 1 + self._skipped)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    if self._batches is not None:
      self._batches.close()
