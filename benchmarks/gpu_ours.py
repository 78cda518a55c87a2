# SPDX-License-Identifier: Apache-2.0
"""Our side of benchmarks/gpu.py: the step that `paxlike` would run, compiled, read and timed."""

import gzip
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import experiments
import gpu_experiment
import gpu_timing
import jax

from paxlike.compilation import aot, hlo_kernels
from paxlike.devices import chips, xla_flags
from paxlike.layers.module import Definition
from paxlike.training import train_state
from paxlike.training.trainer import Trainer


def main():
  task = gpu_timing.task()
  batch = {"PERCORE_BATCH_SIZE": task.case["batch"]}
  name, knobs = task.model["experiment"], task.model["flags"] | batch
  _, trainer = experiments.build(name, gpu_experiment.arguments(knobs))
  with jax.set_mesh(trainer.devices):
    program = aot.compile_step(trainer)
    run = Run(trainer, program)
    times = gpu_timing.measure(run.step, run.wait, task)
  text = program.text
  if not task.case["again"]:
    path = pathlib.Path(task.output) / f"{task.case['name']}.hlo.gz"
    path.write_bytes(gzip.compress(text.encode()))
  read, warnings = contents(program, text, trainer.definition, fp8=task.facts["fp8"], gpu=task.gpu)
  warnings += [f"this JAX has no option {option}" for option in xla_flags.options()[1]]
  device = trainer.devices.devices.flat[0]
  # CPUs have no such statistics.
  peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
  gpu_timing.tell(
    **times._asdict(),
    first_loss=run.first_loss,
    last_loss=run.loss,
    compile_seconds=program.seconds,
    peak_bytes=program.memory.peak if peak is None else peak,
    memory_bytes=program.memory._asdict(),
    attention=", ".join(trainer.attention),
    dtypes=run.dtypes,
    versions={"jax": jax.__version__},
    device=device.device_kind,
    warnings=warnings,
    **read,
  )


class Run:
  """The state of a run, and its batches on the devices.

  Attributes:
    first_loss: Of the first step, in nats a token.
  """

  def __init__(self, trainer: Trainer, program: aot.Program):
    if program.step is None:
      raise SystemExit("gpu_ours.py: the step does not fit into the device's memory.")
    self._step = program.step
    self._state: Any = train_state.create(
      trainer.definition, trainer.optimizer, trainer.devices, seed=trainer.seed
    )
    with trainer.data.batches(trainer.batch_size, rows=trainer.placer.rows) as batches:
      some = itertools.islice(batches, gpu_timing.BATCHES)
      self._batches = itertools.cycle([trainer.placer.put(batch.arrays) for batch in some])
    self._metrics: dict[str, Any] = {}
    self.first_loss: float | None = None

  def step(self):
    """Begins a step."""
    self._state, self._metrics = self._step(self._state, next(self._batches))

  def wait(self):
    """Waits for the last step."""
    jax.block_until_ready(self._metrics)
    if self.first_loss is None:
      self.first_loss = self.loss

  @property
  def dtypes(self) -> str:
    """Those of trained weights and of the optimizer's moments."""
    moments = [leaf for leaf in jax.tree.leaves(self._state.opt_state) if leaf.ndim]
    both = (jax.tree.leaves(self._state.params), moments)
    return " / ".join(", ".join(sorted({leaf.dtype.name for leaf in one})) for one in both)

  @property
  def loss(self) -> float:
    """That of the last step, in nats a token."""
    total, weight = self._metrics["loss"]
    return float(total) / float(weight)


def contents(
  program: aot.Program, text: str, definition: Definition, *, fp8: bool, gpu: bool
) -> tuple[dict[str, Any], list[str]]:
  """Returns what a GPU runs by the program's text, and what of that should not be.

  `fp8` is whether blocks are to multiply in it, `gpu` whether there is one.
  """
  chip = program.chip
  if not gpu or not isinstance(chip, chips.Chip) or not chip.bandwidth:
    return {}, ["no GPU that is known: the program was not read"] * gpu
  found = hlo_kernels.kernels(text, chip)
  groups = dict(hlo_kernels.grouped(found, "group"))
  launches = {name: total.count for name, total in groups.items()}
  warnings = []
  if "__cudnn$fmha" not in text:
    warnings.append("attention is not cuDNN's")
  if fp8:
    share = not_in_8_bits(groups, program.tokens, definition)
    warnings += [f"{share:.3g} of the products of blocks are not in FP8"] * (share > 0)
  if "matmul tf32" in launches:
    worst = next(kernel for kernel in found if kernel.group == "matmul tf32")
    warnings.append(f"{launches['matmul tf32']} float32 products: {worst.kind} {worst.source}")
  return {"launches": launches, "roofline_seconds": hlo_kernels.total(found).seconds}, warnings


def not_in_8_bits(
  groups: Mapping[str, hlo_kernels.HloKernel], tokens: int, definition: Definition
) -> float:
  """Returns the share of the FLOPs of blocks' products that a GPU does not do in FP8.

  For steps that train all weights, and compute nothing again.
  """
  sizes = {key: math.prod(spec.shape) for key, spec in definition.weights.items()}
  blocks = sum(size for key, size in sizes.items() if key.endswith(".w") and "stack" in key)
  done = groups["matmul fp8"].flops if "matmul fp8" in groups else 0
  # Once forward and twice backward, a multiplication and an addition each.
  return 1 - done / (6 * tokens * blocks)


if __name__ == "__main__":
  main()
