# SPDX-License-Identifier: Apache-2.0
"""Compiles the step of a run for devices that need not be here, and tells what came of it."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import jax

from paxlike import chips, kernels, train_state
from paxlike.errors import RunError, UserError
from paxlike.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Program:
  """The step of a run, compiled.

  Attributes:
    step: What XLA made.
    seconds: How long it took.
    chip: One of the devices; None where its data are not known.
    num_devices: Of the mesh.
    tokens: That one step trains on.
  """

  step: jax.stages.Compiled
  seconds: float
  chip: chips.Chip | None
  num_devices: int
  tokens: int

  def kernels(self) -> list[kernels.Kernel]:
    """Returns what one step launches on each device.

    Raises:
      RunError: It is not known what the device can do.
    """
    if self.chip is None or not self.chip.bandwidth:
      raise RunError("--kernels: the bandwidth of this device is not known. Give a --topology.")
    return kernels.kernels(self.step.as_text() or "", self.chip)


def compile_step(trainer: Trainer) -> Program:
  """Compiles the step of a run; reads no data and allocates nothing.

  Raises:
    UserError: There is no training, or the devices cannot share a batch.
  """
  if trainer.train_data is None:
    raise UserError("this experiment has no training data, so there is no step to compile.")
  trainer.check_batch()
  devices = trainer.devices
  state = train_state.abstract(
    trainer.definition, trainer.optimizer, devices, with_reference=trainer.has_reference
  )
  batch: Any = trainer.feed.abstract(trainer.train_data.no_rows())
  began = time.perf_counter()
  with jax.set_mesh(devices):
    step = trainer.compile(state, batch)
  return Program(
    step=step,
    seconds=time.perf_counter() - began,
    chip=chips.find(devices.devices.flat[0].device_kind),
    num_devices=devices.size,
    tokens=trainer.batch_size * trainer.data.seq_len,
  )


def memory(program: Program) -> Iterator[tuple[str, str]]:
  """Yields what a step holds on each device, as rows of a table."""
  held: Any = program.step.memory_analysis()
  arguments, temporary = held.argument_size_in_bytes, held.temp_size_in_bytes
  fresh = held.output_size_in_bytes - held.alias_size_in_bytes
  peak = arguments + temporary + fresh
  yield "arguments", f"{arguments / 1e9:.2f} GB"
  yield "temporaries", f"{temporary / 1e9:.2f} GB"
  if program.chip is None or not program.chip.memory:
    yield "all", f"{peak / 1e9:.2f} GB"
    return
  room = program.chip.memory
  verdict = "fits" if peak <= room else "does not fit"
  yield "all", f"{peak / 1e9:.2f} GB of {room / 1e9:.2f} GB: {verdict}"


def kernel_rows(program: Program, *, most: int = 30) -> Iterator[tuple[str, ...]]:
  """Yields the kernels of a step by group, then the `most` expensive ones, as rows of a table.

  The columns are milliseconds, launches, GB, TFLOP, and what it is.
  """
  found = program.kernels()

  def row(name: str, one: kernels.Kernel) -> tuple[str, ...]:
    return (
      f"{one.seconds * 1e3:.3f}",
      f"{one.count:,}",
      f"{one.nbytes / 1e9:.3f}",
      f"{one.flops / 1e12:.3f}",
      name,
    )

  every = kernels.total(found)
  speed = program.tokens / program.num_devices / every.seconds
  yield row(f"all: at most {speed:,.0f} tokens/s/device", every)
  for name, one in kernels.grouped(found, "group"):
    yield row(name, one)
  yield ("", "", "", "", "")
  for name, one in kernels.grouped(found, "kind")[:most]:
    yield row(f"{one.group}: {name}", one)
