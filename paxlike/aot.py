# SPDX-License-Identifier: Apache-2.0
"""Compiles the step of a run for devices that need not be here, and tells what came of it."""

import dataclasses
import time
from typing import Any, NamedTuple

import jax

from paxlike import chips, kernels, train_state
from paxlike.errors import RunError
from paxlike.trainer import Trainer


class Held(NamedTuple):
  """Bytes on one device; results are those that do not take the place of arguments."""

  arguments: int
  temporaries: int
  results: int


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

  @property
  def held(self) -> Held:
    """What a step holds on each device."""
    told: Any = self.step.memory_analysis()
    return Held(
      arguments=told.argument_size_in_bytes,
      temporaries=told.temp_size_in_bytes,
      results=told.output_size_in_bytes - told.alias_size_in_bytes,
    )

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
    UserError: There is nothing to train, or the devices cannot share a batch.
  """
  trainer.check_step()
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
