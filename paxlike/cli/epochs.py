# SPDX-License-Identifier: Apache-2.0
"""NUM_EPOCHS: the length of a run in passes over the training data."""

import math
from collections.abc import Callable
from typing import Any

from paxlike.config.knobs import UNSET
from paxlike.errors import UserError
from paxlike.experiment import Experiment
from paxlike.training import ramp


def resolve(experiment: Experiment, build: Callable[[], Any]):
  """Converts NUM_EPOCHS to MAX_STEPS, and sets NUM_EPOCHS to None.

  If both are set, the more specific one applies: that of the command line, or of the subclass.

  Args:
    experiment: Changed in place.
    build: Returns its trainer, whose data and devices determine the steps of an epoch.

  Raises:
    UserError: Both are set in the same place, or the length of the data is unknown.
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
  """Returns 0 for a knob of the command line, else 1 + the MRO index of the class that sets it."""
  if name in experiment.settings():
    return 0
  return 1 + type(experiment).__mro__.index(experiment.knobs()[name].set_in)


def _steps(trainer: Any, epochs: float) -> int:
  data = trainer.train_data
  if data is None:
    raise UserError(f"NUM_EPOCHS={epochs:g}: this experiment has no training data.")
  data.check()
  sequences = data.epoch_rows
  if sequences is None:
    raise UserError(
      f"NUM_EPOCHS={epochs:g}: the length of {data.named} is unknown or infinite: set MAX_STEPS."
    )
  if trainer.rollouts is not None:
    return max(math.ceil(epochs * sequences / trainer.rollouts.num_given), 1)
  return max(ramp.num_steps(trainer.stages, epochs * sequences), 1)
