# SPDX-License-Identifier: Apache-2.0
"""Rollbacks: after a spike, a run goes on from its newest checkpoint with the data after the spike.

PaLM was trained so (Chowdhery et al., 2022, arXiv:2204.02311, section 5.1): with the same weights,
other data give no spike.
"""

import dataclasses
import json
from typing import Any

import jax
from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import RunError, UserError

FILE = "rollbacks.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
  """A rollback.

  Attributes:
    checkpoint: The completed steps of the checkpoint.
    spike: The step of the spike, counted from 0. The data of steps `checkpoint` to `spike` are
      skipped.
    train_input: The position in the data from which the run goes on.
  """

  checkpoint: int
  spike: int
  train_input: dict[str, Any]


class Rollbacks:
  """The rollbacks of a run, in a file in its folder: a restart at the same step repeats them."""

  def __init__(self, folder: epath.Path, *, most: int):
    """Reads the file. After `most` rollbacks to a checkpoint, one more spike ends the run.

    Raises:
      UserError: The file is damaged.
    """
    self._path = folder / FILE
    self._most = most
    self._all: list[Rollback] = []
    if not self._path.exists():
      return
    try:
      self._all = [Rollback(**one) for one in json.loads(file_io.read_bytes(self._path))]
      if not all(type(step) is int for one in self._all for step in (one.checkpoint, one.spike)):
        raise TypeError("a step is not a number")
    except (OSError, *file_io.MALFORMED) as error:
      raise UserError(
        f"{self._path} is damaged ({file_io.reason(error)}), so which data this run skips is"
        " unknown: restore the file, or remove it to skip none."
      ) from error

  def forget(self, *, after: int):
    """Drops rollbacks to checkpoints beyond `after`; -1: all, since a new run begins."""
    self._all = [one for one in self._all if one.checkpoint <= after]

  def text(self) -> str | None:
    """Returns the content of the file; None: there is no rollback."""
    if not self._all:
      return None
    return json.dumps([dataclasses.asdict(one) for one in self._all], indent=2) + "\n"

  def position(self, checkpoint: int, saved: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the position from which the data go on after a checkpoint: `saved`, or later."""
    found = [one.train_input for one in self._all if one.checkpoint == checkpoint]
    return found[-1] if found else saved

  def add(self, rollback: Rollback):
    """Records a rollback.

    Raises:
      RunError: There were as many as allowed to this checkpoint.
      UserError: The file cannot be written.
    """
    count = sum(one.checkpoint == rollback.checkpoint for one in self._all)
    if count >= self._most:
      raise RunError(
        f"step {rollback.spike} is a spike. The run has rolled back to checkpoint"
        f" {rollback.checkpoint} as often as MAX_SKIPPED_STEPS_IN_A_ROW={self._most} allows. Lower"
        " LEARNING_RATE, look at the data, or raise SPIKE_DEVIATIONS; the checkpoints are intact."
      )
    self._all.append(rollback)
    if jax.process_index() == 0:
      with run_folder.writing(self._path.parent):
        file_io.write(self._path, self.text() or "")
