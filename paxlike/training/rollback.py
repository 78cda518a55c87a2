# SPDX-License-Identifier: Apache-2.0
"""Rollbacks: after a spike, a run goes on from its newest checkpoint with the data after the spike.

PaLM was trained so (Chowdhery et al., 2022, arXiv:2204.02311, section 5.1): restarted from the same
weights with other data, it saw no spike.
"""

import dataclasses
import json
import os
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.errors import RunError, UserError
from paxlike.processes.host_collectives import broadcast

FILE = "rollbacks.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollback:
  """A rollback.

  Attributes:
    checkpoint: The completed steps of the checkpoint.
    spike: The step of the spike, counted from 0. The data up to those of this step are skipped.
      -1: none are.
    train_input: The position in the data from which the run goes on.
    run: The folder of the run whose rollback it was; empty: this one's.
  """

  checkpoint: int
  spike: int
  train_input: dict[str, Any]
  run: str = ""


def _check(rollback: Rollback):
  """Raises a TypeError if a value is of another type."""
  if type(rollback.checkpoint) is not int or type(rollback.spike) is not int:
    raise TypeError("a step is not a number")
  if not isinstance(rollback.train_input, dict):
    raise TypeError("train_input is no position in data")


class Rollbacks:
  """The rollbacks of a run; a restart from the same checkpoint skips the same data."""

  def __init__(self, folder: epath.Path, *, most: int):
    """Reads those of earlier starts, in process 0 for all processes.

    After `most` rollbacks to a checkpoint, one more spike ends the run.

    Raises:
      UserError: Their file is damaged or cannot be read.
    """
    path = folder / FILE
    self._most = most

    def content() -> bytes:
      try:
        if not path.exists():
          return b"[]"
        text = file_io.read_bytes(path)
        for one in json.loads(text):
          _check(Rollback(**one))
      except (OSError, *file_io.MALFORMED) as error:
        raise UserError(
          f"{path} cannot be read ({file_io.reason(error)}), so which data this run skips is"
          " unknown: restore the file, or remove it to skip none."
        ) from error
      return text

    self._all = [Rollback(**one) for one in json.loads(bytes(broadcast(content)))]

  def inherit(self, run: epath.Path, checkpoint: int):
    """Takes over what another run skipped at the checkpoint that this run begins with.

    This is done once, and recorded even if it was nothing: the other run may yet roll back.

    Raises:
      UserError: The other run's record is damaged or cannot be read.
    """
    name = os.fspath(run)
    if not any((one.run, one.checkpoint) == (name, checkpoint) for one in self._all):
      last = Rollbacks(run, most=self._most).last(checkpoint)
      last = last or Rollback(checkpoint=checkpoint, spike=-1, train_input={})
      self._all = [dataclasses.replace(last, run=name)]

  def forget(self, *, after: int):
    """Drops rollbacks to checkpoints beyond `after`, which the run will reach anew."""
    self._all = [one for one in self._all if one.checkpoint <= after]

  def text(self) -> str | None:
    """Returns the content of the file; None: there is no rollback."""
    if not self._all:
      return None
    return json.dumps([dataclasses.asdict(one) for one in self._all], indent=2) + "\n"

  def last(self, checkpoint: int) -> Rollback | None:
    """Returns the last rollback to a checkpoint; None: no data are skipped there."""
    found = [one for one in self._all if one.checkpoint == checkpoint and one.spike >= 0]
    return found[-1] if found else None

  def add(self, rollback: Rollback):
    """Adds a rollback.

    Raises:
      RunError: There were as many as allowed to this checkpoint.
    """
    count = sum(one.checkpoint == rollback.checkpoint and not one.run for one in self._all)
    if count >= self._most:
      raise RunError(
        f"step {rollback.spike} is a spike. The run has rolled back to checkpoint"
        f" {rollback.checkpoint} as often as MAX_SKIPPED_STEPS_IN_A_ROW={self._most} allows. Lower"
        " LEARNING_RATE, look at the data, or raise SPIKE_DEVIATIONS; the checkpoints are intact."
      )
    self._all.append(rollback)
