# SPDX-License-Identifier: Apache-2.0
"""Ahead-of-time compilation of a run's step, for devices that need not be attached."""

import dataclasses
import math
import re
import time
from typing import Any, NamedTuple

import jax

from paxlike.compilation import hlo_collectives as collectives
from paxlike.compilation import hlo_kernels as kernels
from paxlike.compilation import hlo_text, saved_step
from paxlike.devices import chips, malloc, mesh, program_cache
from paxlike.errors import UserError
from paxlike.layers import flops
from paxlike.layers.remat import Remat
from paxlike.layers.stack import Stack
from paxlike.training import preflight
from paxlike.training.trainer import Trainer

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class ProgramMemory(NamedTuple):
  """The memory that a program needs, in bytes per device.

  Attributes:
    arguments: The training state and the batch.
    temporaries: Buffers that are allocated during the step.
    peak: The peak memory.
  """

  arguments: int
  temporaries: int
  peak: int


@dataclasses.dataclass(frozen=True)
class Program:
  """The compiled step of a run.

  Attributes:
    step: The compiled program; None if XLA could not fit it into device memory.
    memory: What it needs; if `step` is None, the memory that XLA requested.
    seconds: The compilation time.
    chip: The chip of the devices; None if its data sheet is unknown.
    devices: The mesh.
    tokens: Tokens per step.
    flops: FLOPs per step on all devices, counted as `flops.TrainingFlops.full`.
    communicators: The number of NCCL communicators, one per group of mesh axes with collectives.
  """

  step: jax.stages.Compiled | None
  memory: ProgramMemory
  seconds: float
  chip: chips.Chip | None
  devices: jax.sharding.Mesh
  tokens: int
  flops: float
  communicators: int = 0

  @property
  def usable_memory(self) -> int | None:
    """Bytes of memory per device that programs may use; None: unknown."""
    return (
      (self.chip.usable_memory_beside(self.communicators) or None)
      if self.chip is not None
      else None
    )

  @property
  def share(self) -> float | None:
    """The XLA_PYTHON_CLIENT_MEM_FRACTION that leaves memory for NCCL; None: the default does."""
    if (
      self.chip is None
      or self.usable_memory is None
      or self.usable_memory == self.chip.usable_memory
    ):
      return None
    return self.chip.share_beside(self.communicators)

  @property
  def fits(self) -> bool:
    """Whether the step fits in device memory, or the memory is unknown."""
    return self.step is not None and (
      self.usable_memory is None or self.memory.peak <= self.usable_memory
    )

  @property
  def ideal_seconds(self) -> float | None:
    """The step time at the chips' peak bf16 FLOP/s; None: unknown."""
    return self.flops / self.devices.size / self.chip.flops if self.chip is not None else None

  def overlap(self) -> list[collectives.Overlap]:
    """Returns how the collectives overlap with computation."""
    return [] if self.step is None else collectives.overlap(self.text, self.devices)

  def collectives(self) -> list[collectives.Collective]:
    """Returns the collectives of a step."""
    return [] if self.step is None else collectives.collectives(self.text, self.devices)

  def sent_by_optimizer(self) -> float:
    """Returns the bytes that each device sends in the collectives of the optimizer in a step."""
    found = collectives.instructions(self.text, self.devices)
    return sum(one.nbytes for one in found if hlo_text.OPTIMIZER in one.source)

  def kernels(self) -> list[kernels.HloKernel]:
    """Returns the kernels of a step on each device."""
    assert self.chip is not None
    return kernels.kernels(self.text, self.chip)

  @property
  def text(self) -> str:
    """The optimised HLO text; empty if there is no program."""
    return (self.step.as_text() if self.step is not None else None) or ""


def compile_step(trainer: Trainer, *, save: str | None = None) -> Program:
  """Compiles the step of a run, and saves it to a file; reads no data and allocates no arrays.

  Raises:
    UserError: There is nothing to train, the mesh does not divide the batch, or the file cannot be
      written.
  """
  preflight.check_setup(trainer, training=True)
  if save is not None:
    saved_step.check(save)
    saved_step.check_devices("save", trainer.devices)
  devices = trainer.devices
  state, batch = trainer.abstract()
  tokens = trainer.batch_size * trainer.data.seq_len
  began = time.perf_counter()
  try:
    cache = program_cache.usable(devices.devices.flat[0], to_save=save is not None)
    with jax.set_mesh(devices), malloc.trimmed(), cache:
      lowered = trainer.lower(state, batch)
      step = trainer.execution.compile_step(lowered)
    memory = _memory_of(step, devices.devices.flat[0].platform)
  except jax.errors.JaxRuntimeError as error:
    step, memory = None, _asked_for(str(error), _bytes_per_device((state, batch)))
    if memory is None:
      raise
  seconds = time.perf_counter() - began
  if save is not None and step is not None:
    saved_step.save(save, step, lowered, devices, trainer.execution.compiler_options)
  program = Program(
    step=step,
    memory=memory,
    seconds=seconds,
    chip=chips.find(devices.devices.flat[0].device_kind),
    devices=devices,
    tokens=tokens,
    flops=tokens * flops.per_token(trainer.definition, trainer.data.seq_len).full,
  )
  if program.chip is None or not program.chip.is_gpu:
    return program
  groups = {one.axes for one in program.collectives()}
  return dataclasses.replace(program, communicators=len(groups))


def load_step(trainer: Trainer, path: str) -> jax.stages.Compiled:
  """Returns the step of a run from a file that `compile_step` saved.

  Raises:
    UserError: The file is not of this step.
  """
  with jax.set_mesh(trainer.devices):
    lowered = trainer.lower(*trainer.abstract())
  return saved_step.load(path, lowered, trainer.devices, trainer.execution.compiler_options)


def check_kernels(trainer: Trainer):
  """Checks that the kernels of a run's step can be reported.

  Raises:
    UserError: They cannot.
  """
  device = trainer.devices.devices.flat[0]
  chip = chips.find(device.device_kind)
  if chip is None or not chip.bandwidth:
    raise UserError(
      f"--kernels needs the data sheet of the device, and has none of {device.device_kind}: give a"
      " --topology such as h200-1."
    )


def _memory_of(step: jax.stages.Compiled, platform: str) -> ProgramMemory:
  stats: Any = step.memory_analysis()
  arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
  results = stats.output_size_in_bytes - stats.alias_size_in_bytes
  # TPUs report temporaries without buffer reuse, other platforms as one block with reuse.
  peak = stats.peak_memory_in_bytes if platform == "tpu" else arguments + temporaries + results
  return ProgramMemory(arguments, temporaries, peak)


def _asked_for(message: str, arguments: int) -> ProgramMemory | None:
  """Returns the memory that a TPU compiler's out-of-memory error reports; None for other errors."""
  match = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds available", message)
  if "RESOURCE_EXHAUSTED" not in message or match is None:
    return None
  asked = int(float(match[1]) * _UNITS[match[2]])  # Includes arguments and results.
  return ProgramMemory(arguments, max(0, asked - arguments), asked)


def _bytes_per_device(tree: Any) -> int:
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(tree)
  )


def advice(trainer: Trainer, program: Program) -> list[str]:
  """Returns changes of knobs that reduce the memory of a step that does not fit, cheapest first."""
  usable_memory, memory, found = program.usable_memory or 0, program.memory, []
  shape = ", ".join(f"{axis} {size}" for axis, size in program.devices.shape.items() if size > 1)
  if memory.arguments > usable_memory:
    found.append(
      f"shard weights and optimizer over more devices by fsdp or tensor (now {shape or 'one'})"
    )
    if program.devices.shape["data"] > 1 and not trainer.optimizer.over_data:
      found.insert(0, "SHARD_OPTIMIZER_OVER_DATA=True")
    found.append("ADAM_MOMENT_DTYPE=bfloat16, and WEIGHT_DTYPE=bfloat16")
    return found
  stack = trainer.model.stack
  assert isinstance(stack, Stack)
  if stack.remat is not Remat.SAVE_NOTHING:
    found.append(f"CHECKPOINT_POLICY=SAVE_NOTHING (now {stack.remat.name})")
  if not stack.layout.scanned:
    found.append("USE_REPEATED_LAYER=True")
  if stack.pipeline is not None and not stack.pipeline.recompute:
    found.append("PIPELINE_RECOMPUTE=True")
  steps = trainer.accumulation_steps
  microbatches = 1 if stack.pipeline is None else stack.pipeline.microbatches
  whole = mesh.batch_shards(trainer.devices) * steps * microbatches
  sequences = trainer.batch_size // whole
  if sequences > 1:
    factor = next(n for n in range(2, sequences + 1) if sequences % n == 0)
    if stack.pipeline is None:
      found.append(f"GRADIENT_ACCUMULATION_STEPS={steps * factor} (now {steps})")
    else:
      found.append(f"NUM_MICROBATCHES={microbatches * factor} (now {microbatches})")
    share = max(0.0, (usable_memory - memory.arguments) / max(1, memory.peak - memory.arguments))
    # Less than proportional: some temporaries do not shrink with the batch.
    most = math.floor(0.8 * share * trainer.percore_batch_size)
    fitting = [n for n in range(1, most + 1) if n * program.devices.size % whole == 0]
    if fitting:
      found.append(f"PERCORE_BATCH_SIZE={fitting[-1]} (now {trainer.percore_batch_size:g})")
  found.append(f"tensor parallelism (now {shape or 'one device'})")
  return found
