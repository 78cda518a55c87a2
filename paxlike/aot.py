# SPDX-License-Identifier: Apache-2.0
"""Compiles the step of a run for devices that need not be here, and tells what came of it."""

import dataclasses
import math
import re
import time
from typing import Any, NamedTuple

import jax

from paxlike import chips, collectives, flops, kernels, mesh, saved_step, train_state
from paxlike.errors import UserError
from paxlike.layers.stack import Remat, Stack
from paxlike.trainer import Trainer

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Held(NamedTuple):
  """Bytes on one device.

  Attributes:
    arguments: The training state and the batch.
    temporaries: All that is made on the way.
    peak: The most that there is at one time.
  """

  arguments: int
  temporaries: int
  peak: int


@dataclasses.dataclass(frozen=True)
class Program:
  """The step of a run, compiled.

  Attributes:
    step: What XLA made; None if it found no way to fit it into the memory of a device.
    held: Of memory; where `step` is None the temporaries are all that XLA asked for.
    seconds: How long compiling took.
    chip: One of the devices; None where its data are not known.
    devices: Their mesh.
    tokens: That one step trains on.
    flops: Of one step on all devices, counted as `flops.TrainingFlops.full`.
  """

  step: jax.stages.Compiled | None
  held: Held
  seconds: float
  chip: chips.Chip | None
  devices: jax.sharding.Mesh
  tokens: int
  flops: float

  @property
  def room(self) -> int | None:
    """Bytes of memory that a device has for programs, where that is known."""
    return self.chip.memory if self.chip is not None and self.chip.memory else None

  @property
  def fits(self) -> bool:
    """Whether a device has memory enough, or it is not known how much it has."""
    return self.step is not None and (self.room is None or self.held.peak <= self.room)

  @property
  def ideal_seconds(self) -> float | None:
    """What a step would take if devices did nothing but its FLOPs, at the rate of bf16."""
    return self.flops / self.devices.size / self.chip.flops if self.chip is not None else None

  @property
  def collectives(self) -> list[collectives.Collective]:
    """What devices send each other in a step."""
    return [] if self.step is None else collectives.collectives(self.text, self.devices)

  def kernels(self) -> list[kernels.Kernel]:
    """Returns what one step launches on each GPU."""
    assert self.chip is not None
    return kernels.kernels(self.text, self.chip)

  @property
  def text(self) -> str:
    """The program, as XLA writes it; empty if there is none."""
    return (self.step.as_text() if self.step is not None else None) or ""


def compile_step(trainer: Trainer, *, save: str | None = None) -> Program:
  """Compiles the step of a run, and saves it in a file; reads no data and allocates nothing.

  Raises:
    UserError: There is nothing to train, or the devices cannot share a batch.
  """
  trainer.check_step()
  devices = trainer.devices
  state, batch = _abstract(trainer)
  tokens = trainer.batch_size * trainer.data.seq_len
  began = time.perf_counter()
  try:
    with jax.set_mesh(devices):
      lowered = trainer.lower(state, batch)
      step = lowered.compile(compiler_options=dict(trainer.compiler_options))
    held = _held(step)
  except jax.errors.JaxRuntimeError as error:
    step, held = None, _asked_for(str(error), _bytes_per_device((state, batch)))
    if held is None:
      raise
  if save is not None and step is not None:
    saved_step.save(save, step, lowered, devices)
  return Program(
    step=step,
    held=held,
    seconds=time.perf_counter() - began,
    chip=chips.find(devices.devices.flat[0].device_kind),
    devices=devices,
    tokens=tokens,
    flops=tokens * flops.per_token(trainer.definition, trainer.data.seq_len).full,
  )


def load_step(trainer: Trainer, path: str) -> jax.stages.Compiled:
  """Returns the step of a run from a file that `compile_step` saved.

  Raises:
    UserError: The file is not of this step.
  """
  with jax.set_mesh(trainer.devices):
    return saved_step.load(path, trainer.lower(*_abstract(trainer)), trainer.devices)


def _abstract(trainer: Trainer) -> tuple[Any, Any]:
  """Returns the shapes, dtypes and shardings of a run's state and of its batches."""
  state = train_state.abstract(
    trainer.definition, trainer.optimizer, trainer.devices, with_reference=trainer.has_reference
  )
  return state, trainer.feed.abstract(trainer.train_data.no_rows())


def check_kernels(trainer: Trainer):
  """Finds whether the kernels of a run's step could be told.

  Raises:
    UserError: They could not.
  """
  device = trainer.devices.devices.flat[0]
  chip = chips.find(device.device_kind)
  if device.platform == "tpu" or chip is None or not chip.bandwidth:
    raise UserError(
      f"--kernels reads programs for NVIDIA's GPUs, not for {device.device_kind}: give a --topology"
      " such as h200-1."
    )


def _held(step: jax.stages.Compiled) -> Held:
  told: Any = step.memory_analysis()
  arguments, temporaries = told.argument_size_in_bytes, told.temp_size_in_bytes
  results = told.output_size_in_bytes - told.alias_size_in_bytes
  peak = getattr(told, "peak_memory_in_bytes", 0)
  # Only TPUs' compiler counts what is there at one time; for others it is a sum.
  is_counted = peak > arguments + results
  return Held(arguments, temporaries, peak if is_counted else arguments + temporaries + results)


def _asked_for(message: str, arguments: int) -> Held | None:
  """Returns what a TPU's compiler found too much; None if that was not what it complained of."""
  told = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", message)
  if "RESOURCE_EXHAUSTED" not in message or told is None:
    return None
  temporaries = int(float(told[1]) * _UNITS[told[2]])
  return Held(arguments, temporaries, arguments + temporaries)


def _bytes_per_device(tree: Any) -> int:
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def advice(trainer: Trainer, program: Program) -> list[str]:
  """Returns what would make a step smaller that does not fit, what costs least first."""
  room, held, found = program.room or 0, program.held, []
  shape = ", ".join(f"{axis} {size}" for axis, size in program.devices.shape.items() if size > 1)
  if held.arguments > room:
    found.append(
      f"cut weights and optimizer over more devices by fsdp or tensor (now {shape or 'one'})"
    )
    found.append("ADAM_MOMENT_DTYPE=bfloat16, and WEIGHT_DTYPE=bfloat16")
    return found
  stack = trainer.model.stack
  assert isinstance(stack, Stack)
  if stack.remat is not Remat.SAVE_NOTHING:
    found.append(f"CHECKPOINT_POLICY=SAVE_NOTHING (now {stack.remat.name})")
  if not stack.layout.scanned:
    found.append("USE_REPEATED_LAYER=True")
  sequences = trainer.batch_size // mesh.batch_shards(trainer.devices) // trainer.accumulation_steps
  if sequences > 1:
    parts = next(n for n in range(2, sequences + 1) if sequences % n == 0)
    steps = trainer.accumulation_steps
    found.append(f"GRADIENT_ACCUMULATION_STEPS={steps * parts} (now {steps})")
    share = max(0.0, (room - held.arguments) / max(1, held.peak - held.arguments))
    smaller = math.floor(share * trainer.percore_batch_size)
    if smaller:
      found.append(f"PERCORE_BATCH_SIZE={smaller} (now {trainer.percore_batch_size:g})")
  found.append(f"tensor parallelism (now {shape or 'one device'})")
  return found
