# SPDX-License-Identifier: Apache-2.0
"""Trains a few steps and traces the last of them, without a run."""

import collections
import dataclasses
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from etils import epath

from paxlike.devices import program_cache
from paxlike.processes import phases
from paxlike.training import profiler, train_state
from paxlike.training.train_state import TrainState
from paxlike.training.trainer import Trainer

#: The first and last step to trace without PROFILE_STEPS.
WINDOW = 3, 7


class Measurement(NamedTuple):
  """What was traced.

  Attributes:
    program: The optimised HLO text of the step.
    folder: The folder of the trace, as given to `profiler.trace`.
    num_steps: The number of traced steps.
    untraced_seconds: Mean time of the steps before, except the first; None: there were none.
  """

  program: str
  folder: str
  num_steps: int
  untraced_seconds: float | None


def measure(trainer: Trainer, folder: str | os.PathLike[str]) -> Measurement:
  """Trains from initial weights to the last step of PROFILE_STEPS, and traces from the first on.

  Raises:
    UserError: The trace cannot be written, or the data cannot be read.
  """
  given = None if trainer.profile is None else trainer.profile.steps
  first, last = given or WINDOW
  untraced = None
  with jax.set_mesh(trainer.devices), trainer.watched():
    phases.enter("compile")
    with program_cache.by_metadata():
      program = trainer.compile(*trainer.abstract())
    phases.enter("init")
    state = _initial(trainer, folder)
    phases.enter("data", 0)
    rows = trainer.placer.rows
    with trainer.data.batches(trainer.batch_size, rows=rows, state=None, updates=0) as batches:
      state = _train(trainer, program, state, batches, range(min(1, first)))
      if first > 1:
        began = time.perf_counter()
        state = _train(trainer, program, state, batches, range(1, first))
        untraced = (time.perf_counter() - began) / (first - 1)
      traced = range(first, last + 1)
      with profiler.trace(folder):
        _train(trainer, program, state, batches, traced)
  return Measurement(program.as_text() or "", os.fspath(folder), len(traced), untraced)


def _initial(trainer: Trainer, folder: str | os.PathLike[str]) -> TrainState:
  state = train_state.create(
    trainer.definition, trainer.optimizer, trainer.devices, seed=trainer.seed
  )
  if trainer.reference is None:
    return state
  reference, _ = trainer.state_source(epath.Path(folder)).reference(state)
  return dataclasses.replace(state, reference=reference)


def _train(
  trainer: Trainer,
  program: jax.stages.Compiled,
  state: TrainState,
  batches: Iterator[Any],
  steps: Iterable[int],
) -> TrainState:
  """Trains as `training.loop` does, with as many steps in flight; waits for the last."""
  pending: collections.deque[Any] = collections.deque()
  for step in steps:
    phases.enter("data", step)
    batch = trainer.placer.put(next(batches).arrays)
    phases.enter("dispatch", step)
    with jax.profiler.StepTraceAnnotation("train", step_num=step):
      state, metrics = program(state, batch)
    phases.enter("step", step)
    pending.append(metrics)
    if len(pending) > trainer.placer.steps_in_flight:
      jax.block_until_ready(pending.popleft())
  return jax.block_until_ready(state)
