# SPDX-License-Identifier: Apache-2.0
"""The training of one model at several learning rates, by one compiled program."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from paxlike.errors import UserError
from paxlike.layers.decoder import Batch
from paxlike.training import train_state
from paxlike.training.optimizers import Schedule
from paxlike.training.train_state import TrainState
from paxlike.training.trainer import Trainer


class RateScale:
  """A factor of a learning-rate schedule that an argument of the compiled step gives."""

  def __init__(self):
    self._factor: Any = 1.0

  def __call__(self, schedule: Schedule) -> Schedule:
    """Returns the schedule with the factor; see `fiddlers.change_rate`."""
    return lambda count: self._factor * schedule(count)

  @contextlib.contextmanager
  def set_to(self, factor: jax.Array) -> Iterator[None]:
    """Context in which schedules are traced with this factor."""
    self._factor = factor
    try:
      yield
    finally:
      self._factor = 1.0


_MOST_TOKENS = 2**28  # Of which each takes about 12 bytes on the host and on the devices.


class Program:
  """The training of one model.

  Attributes:
    trainer: The model, the data and the rest.
  """

  def __init__(self, trainer: Trainer, scale: RateScale):
    """Prepares to train by `trainer`, whose optimizer's schedule has the factor of `scale`."""
    _check(trainer)
    self.trainer = trainer
    self._scale = scale

  @contextlib.contextmanager
  def batches(self, count: int) -> Iterator[list[Batch]]:
    """Context of the mesh with the first batches of the training data, in memory."""
    trainer = self.trainer
    rows = trainer.placer.rows
    with jax.set_mesh(trainer.devices):
      with trainer.data.batches(trainer.batch_size, rows=rows, state=None, updates=0) as batches:
        found = [next(batches).arrays for _ in range(count)]
      yield [trainer.placer.put(arrays) for arrays in found]

  def train(
    self,
    batches: Sequence[Batch],
    factor: float = 1.0,
    *,
    draw: int = 0,
    after_step: Callable[[TrainState], None] = lambda state: None,
  ) -> np.ndarray:
    """Trains from initial weights, a step on each batch; returns the loss of each step.

    It is NaN from the first step on that was not finite, since its update is dropped.

    Args:
      batches: The batches.
      factor: Multiplies the learning rate.
      draw: Which initial weights to begin with; 0: those of the experiment.
      after_step: Called with the initial state and that after each step.
    """
    trainer = self.trainer
    state = train_state.create(
      trainer.definition, trainer.optimizer, trainer.devices, seed=trainer.seed + draw
    )
    after_step(state)
    losses, skipped = [], []
    for batch in batches:
      state, metrics = self._step(state, batch, np.float32(factor))
      losses.append(metrics["loss"])
      skipped.append(metrics["skipped"][0])
      after_step(state)
    losses, skipped = jax.device_get((losses, skipped))
    found = np.array([total / weight for total, weight in losses])
    return np.where(np.cumsum(skipped) > 0, np.nan, found)

  @functools.cached_property
  def _step(self) -> Any:
    step = self.trainer.make_step()

    def scaled(state: TrainState, batch: Batch, factor: jax.Array) -> tuple[Any, ...]:
      with self._scale.set_to(factor):
        return step(state, batch)

    options = dict(self.trainer.execution.compiler_options)
    return jax.jit(scaled, donate_argnums=0, compiler_options=options)


def _check(trainer: Trainer):
  """Raises a UserError unless a run starts from initial weights and has training data."""
  if trainer.train_data is None:
    raise UserError("--mode=transfer trains, and this experiment has no training data.")
  if trainer.restore is not None or trainer.branch is not None:
    raise UserError(
      "--mode=transfer begins with initial weights: leave out CHECKPOINT_RESTORE_PATH and"
      " DECAY_FROM."
    )
  if trainer.ramps:
    raise UserError(
      "--mode=transfer has no ramps: leave out PERCORE_BATCH_SIZE_RAMP and MAX_SEQ_LEN_RAMP."
    )
  guard = trainer.optimizer.guard
  if guard is not None and guard.action not in ("report", "clip"):
    raise UserError("--mode=transfer compares runs of equal steps: leave ON_SPIKE out.")
  if trainer.num_steps < 1:
    raise UserError("--mode=transfer needs MAX_STEPS of at least 1.")
  tokens = trainer.num_steps * trainer.batch_size * trainer.data.seq_len
  if tokens > _MOST_TOKENS:
    raise UserError(
      f"--mode=transfer holds all {tokens:,} tokens of a run in memory, at most {_MOST_TOKENS:,}:"
      " lower MAX_STEPS."
    )
  if trainer.objective.needs_reference:
    raise UserError(
      "--mode=transfer trains initial weights, and the objective of this experiment compares with"
      " a trained model: give an experiment of pre-training."
    )
  trainer.check()
