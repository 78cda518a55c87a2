# SPDX-License-Identifier: Apache-2.0
"""NUM_EPOCHS: as many steps as it takes to go through the training data so often."""

import math
from collections.abc import Callable
from typing import Any

from paxlike.config.knobs import UNSET
from paxlike.errors import UserError
from paxlike.experiment import Experiment


def resolve(experiment: Experiment, build: Callable[[], Any]):
  """Sets MAX_STEPS to what NUM_EPOCHS means, and NUM_EPOCHS to None, if that is what holds.

  Of the two, the one that is set closer to the user holds: on the command line, in a subclass.

  Args:
    experiment: Changed in place.
    build: Returns its trainer, whose data and devices tell how long an epoch is.

  Raises:
    UserError: Both are set in the same place, or the data have no length.
  """
  values = experiment.values()
  epochs = values["NUM_EPOCHS"].value
  if epochs is None:
    return
  ranks = [_rank(experiment, name) for name in ("NUM_EPOCHS", "MAX_STEPS")]
  steps = values["MAX_STEPS"].value
  if steps is not UNSET and ranks[0] == ranks[1]:
    raise UserError(
      f"NUM_EPOCHS={epochs:g} and MAX_STEPS={steps} both say when the run ends: set one of them."
    )
  if steps is UNSET or ranks[0] < ranks[1]:
    experiment.set("MAX_STEPS", _steps(build(), epochs), source=f"NUM_EPOCHS={epochs:g}")
  experiment.set("NUM_EPOCHS", None, source="MAX_STEPS")


def _rank(experiment: Experiment, name: str) -> int:
  """Returns 0 for a knob of the command line, else how far up the class is that sets it."""
  if name in experiment.settings():
    return 0
  return 1 + type(experiment).__mro__.index(experiment.knobs()[name].set_in)


def _steps(trainer: Any, epochs: float) -> int:
  data = trainer.train_data
  if data is None:
    raise UserError(f"NUM_EPOCHS={epochs:g}: this experiment has no training data.")
  data.check()
  rows = data.epoch_rows
  if rows is None:
    raise UserError(
      f"NUM_EPOCHS={epochs:g}: {data.named} have no end, or none that is known: set MAX_STEPS."
    )
  return max(math.ceil(epochs * rows / trainer.batch_size), 1)
