# SPDX-License-Identifier: Apache-2.0
"""Runs all checks."""

from collections.abc import Iterator
from typing import Any

from paxlike.checks import (
  attention,
  bandwidth,
  grouped,
  hardware,
  precision,
  step,
  storage,
  trainers,
  transfers,
)
from paxlike.checks.check import Check
from paxlike.training import preflight


def run(
  graph: Any, build: trainers.Build, *, folder: str | None = None, full: bool = False
) -> Iterator[Check]:
  """Yields the result of each check when it is done. Call it in all processes.

  Args:
    graph: The root graph of an experiment.
    build: Builds the trainer of a graph, as `run_mode.build_trainer` does.
    folder: The run's folder for the checkpoint check; None: skip it.
    full: Whether to check the step of the experiment itself instead of a shrunk model.

  Raises:
    UserError: The mesh does not fit the devices or the batch, the folder cannot be written, or,
      with `full`, the data cannot be read.
  """
  trainer = build(graph)
  preflight.check_setup(trainer, training=True)
  if full:
    step.batch_of(trainer, full=True)  # Unreadable data are an error, not a failed check.
  devices = trainer.devices
  with storage.folder(folder) as own:
    yield from hardware.found(trainer)
    yield from attention.kernels(devices)
    yield from grouped.matmuls(devices)
    yield from precision.matmuls(devices)
    yield from step.steps(graph, build, full=full)
    yield from bandwidth.collectives(trainer)
    yield from transfers.offload(devices)
    yield from storage.saved(trainers.trained(graph, build, full=full), own)
    yield from transfers.input_rate(trainer)
