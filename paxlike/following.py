# SPDX-License-Identifier: Apache-2.0
"""Continuous evaluation: of each checkpoint of a job that runs elsewhere."""

import time

from etils import epath

from paxlike import progress
from paxlike.journal import Journal, is_running
from paxlike.trainer import Trainer


def follow(trainer: Trainer, folder: epath.Path, journal: Journal, *, poll_seconds: float = 5):
  """Evaluates each checkpoint in `folder` as it comes, until the job that writes there ends.

  Raises:
    UserError: There is nothing to evaluate, or it is of another experiment.
  """
  evaluated: int | None = None
  while True:
    # Before the checkpoints are listed: the job may save its last one and end in between.
    running = is_running(folder)
    latest = trainer.origin(folder).checkpoints().latest()
    if latest is not None and latest != evaluated:
      evaluated = trainer.evaluate(folder, journal, step=latest)
    elif not running:
      journal.note("the job has ended")
      return
    else:
      if progress.OWN.now.kind != "poll":  # Once: processes may not look equally often.
        progress.enter("poll")
      time.sleep(poll_seconds)
