# SPDX-License-Identifier: Apache-2.0
"""All checks, one after another."""

from collections.abc import Iterator
from typing import Any

from paxlike import preflight
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


def run(
  graph: Any, build: trainers.Build, *, folder: str | None = None, full: bool = False
) -> Iterator[Check]:
  """Yields the result of each check as soon as it is there. Call it in all processes.

  Args:
    graph: The root graph of an experiment.
    build: Returns the trainer of such a graph, as `main.built`.
    folder: Where a checkpoint is tried; None: nowhere.
    full: Whether the step is that of the whole experiment, rather than of a small model like it.

  Raises:
    UserError: The mesh does not fit the devices or the batch, the folder cannot be written, or, in
      full, the data cannot be read.
  """
  trainer = build(graph)
  preflight.check_setup(trainer, training=True)
  if full:
    step.batch_of(trainer, full=True)  # What cannot be read is no failure of the machine.
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
