# SPDX-License-Identifier: Apache-2.0
"""Continuous evaluation of the checkpoints that another job writes."""

import time

from etils import epath

from paxlike.processes import phases
from paxlike.processes.host_collectives import broadcast
from paxlike.processes.lease import Observer
from paxlike.telemetry.run_log import RunLog
from paxlike.telemetry.run_status import is_running
from paxlike.training.trainer import Trainer


def follow(trainer: Trainer, folder: epath.Path, run_log: RunLog, *, poll_seconds: float = 5):
  """Evaluates new checkpoints in `folder` until the job that writes them ends.

  Raises:
    UserError: There is nothing to evaluate, or it is of another experiment.
  """
  saved = trainer.state_source(folder).checkpoints()
  observer = Observer(folder)

  def look() -> list[int]:
    # `is_running` comes first: the job may save its last checkpoint and end before `steps` is read,
    # and the next look must not miss that checkpoint.
    running = is_running(folder, observer)
    return [running, *saved.steps()[-1:]]

  evaluated: int | None = None
  while True:
    running, *latest = broadcast(look)
    if latest and latest[0] != evaluated:
      evaluated = trainer.evaluate(folder, run_log, step=None)
    elif not running:
      run_log.note("the job has ended")
      return
    else:
      if phases.OWN.now.kind != "poll":  # Consecutive polls are one phase.
        phases.enter("poll")
      time.sleep(poll_seconds)
