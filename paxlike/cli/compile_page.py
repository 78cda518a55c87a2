# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=compile`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from paxlike.compilation import aot, hlo_kernels, hlo_schedule
from paxlike.planning import accuracy, prediction, program_time
from paxlike.planning.prediction import Prediction
from paxlike.planning.program_time import ProgramTime
from paxlike.telemetry import formatting
from paxlike.training.trainer import Trainer


def text(trainer: Trainer, program: aot.Program, *, with_kernels: bool) -> str:
  """Returns the report as text."""
  parts = [formatting.table(("", ""), _rows(trainer, program))]
  if found := program.collectives():
    header = ("sent by each device", "count", "collectives of a step")
    rows = [
      (formatting.nbytes(one.nbytes), f"{one.count:,}", f"{one.kind} over {' x '.join(one.axes)}")
      for one in found
    ]
    parts.append(formatting.table(header, rows, right=range(2)))
    header = ("asynchronous", "synchronous", "sent synchronously", "collectives of the program")
    parts.append(formatting.table(header, _overlap(program), right=range(3)))
  if with_kernels and program.step is not None:
    header = ("ms", "launches", "GB", "TFLOP", "roofline per device")
    parts.append(formatting.table(header, _kernels(program), right=range(4)))
  if len(parts) > 1 and program.devices.shape["pipeline"] > 1:
    parts.append("These tables count the embedding and the loss in every tick of the pipeline.")
  return "\n\n".join(parts)


def facts(trainer: Trainer, program: aot.Program, *, with_kernels: bool) -> dict[str, Any]:
  """Returns the report for JSON: sizes in bytes, times in seconds."""
  found = program.kernels() if with_kernels and program.step is not None else []
  return {
    "parameters": trainer.definition.num_params,
    "device_kind": _kind(program),
    "num_devices": program.devices.size,
    "mesh": dict(program.devices.shape),
    "attention": trainer.attention,
    "sequences_per_step": trainer.batch_size,
    "tokens_per_step": program.tokens,
    "flops_per_step": program.flops,
    "ideal_seconds": program.ideal_seconds,
    "compile_seconds": program.seconds,
    "predicted": _predicted_facts(trainer, program),
    "bytes_per_device": program.memory._asdict(),
    "bytes_of_device": program.usable_memory,
    "fits": program.fits,
    "advice": [] if program.fits else aot.advice(trainer, program),
    "collectives": [one._asdict() for one in program.collectives()],
    "overlap": [one._asdict() for one in program.overlap()],
    **({"kernels": [one._asdict() for one in found]} if with_kernels else {}),
  }


def _predicted_facts(trainer: Trainer, program: aot.Program) -> dict[str, Any] | None:
  found, by_program = _predictions(trainer, program)
  if found is None:
    return None
  return {
    "as_planned": {**found.times.parts, "total": found.times.total},
    "expected_error": accuracy.expected_error(found.model, found.how, found.machine.chip),
    "program": None if by_program is None else by_program._asdict(),
    "bytes_per_device": {**dataclasses.asdict(found.memory), "total": found.memory.total},
  }


def _overlap(program: aot.Program) -> Iterator[tuple[str, ...]]:
  for one in program.overlap():
    where = "in loops" if one.in_loop else "outside"
    nbytes = formatting.nbytes(one.synchronous_nbytes)
    yield str(one.asynchronous), str(one.synchronous), nbytes, f"{one.kind} {where}"


def _kind(program: aot.Program) -> str:
  return program.devices.devices.flat[0].device_kind


def _rows(trainer: Trainer, program: aot.Program) -> Iterator[tuple[str, str]]:
  devices = program.devices
  axes = ", ".join(f"{axis} {size}" for axis, size in devices.shape.items() if size > 1)
  yield "parameters", f"{trainer.definition.num_params:,}"
  yield "devices", f"{devices.size} x {_kind(program)}{f': {axes}' if axes else ''}"
  yield "global batch", f"{trainer.batch_size:,} sequences = {program.tokens:,} tokens"
  yield "attention", ", ".join(trainer.attention)
  yield "FLOPs per step", f"{program.flops:.4g}{_at_least(program)}"
  yield "compile time", f"{program.seconds:.1f} s"
  yield from _predicted(trainer, program)
  if trainer.execution.pgle_profile is not None:
    left, whole = hlo_schedule.exposed(program.text, trainer.execution.pgle_profile.costs)
    hidden = f"{(whole - left) / 1e3:.3f} of {whole / 1e3:.3f} ms"
    yield "collectives, by the profile", f"{hidden} are beside computation"
  memory, usable = program.memory, program.usable_memory
  yield "memory per device: arguments", formatting.nbytes(memory.arguments)
  yield "memory per device: temporaries", formatting.nbytes(memory.temporaries)
  if program.communicators:
    share = "" if program.share is None else f": XLA_PYTHON_CLIENT_MEM_FRACTION={program.share:g}"
    yield "NCCL communicators", f"{program.communicators}{share}"
  peak = formatting.nbytes(memory.peak)
  if usable is None:
    yield "memory per device: peak", peak
  elif program.fits:
    left = formatting.nbytes(usable - memory.peak)
    yield "memory per device: peak", f"{peak} of {formatting.nbytes(usable)}: fits, {left} left"
  else:
    yield "memory per device: peak", f"{peak} of {formatting.nbytes(usable)}: does not fit"
    for line in aot.advice(trainer, program):
      yield "to reduce it", line


def _predicted(trainer: Trainer, program: aot.Program) -> Iterator[tuple[str, str]]:
  """Yields the time of a step by its program and by the model of plans."""
  found, by_program = _predictions(trainer, program)
  if found is None:
    return
  expected = accuracy.expected_error(found.model, found.how, found.machine.chip)
  by_plan = f"{found.times.total:.4g} s +- {expected:.0%}, bound by {found.times.bound}"
  yield "predicted step, by the planner", by_plan
  if by_program is None:
    return
  exposed = f"{by_program.exposed:.3g} s of it waiting for collectives"
  yield "predicted step, by this program", f"{by_program.total:.4g} s, {exposed}"
  sent = formatting.nbytes(program.sent_by_optimizer())
  yield "of it, the optimizer", f"{by_program.optimizer:.3g} s, {sent} sent by each device"
  difference = by_program.total / found.times.total - 1
  if abs(difference) > expected:
    more = "longer" if difference > 0 else "less"
    yield (
      "warning",
      f"by its program, the step takes {abs(difference):.0%} {more} than by the planner",
    )


def _predictions(
  trainer: Trainer, program: aot.Program
) -> tuple[Prediction | None, ProgramTime | None]:
  found = prediction.of_trainer(trainer)
  if found is None or program.step is None:
    return found, None
  pipeline = found.how.pipeline
  return found, program_time.predict(
    program.text,
    list(program.devices.devices.flat),
    found.machine,
    # All conditionals of a pipeline are in its ticks: first chunks embed, last ones have the loss.
    share_taken=pipeline.plan.chunk_share if pipeline else 1.0,
  )


def _at_least(program: aot.Program) -> str:
  if program.chip is None or program.ideal_seconds is None:
    return ""
  rate = program.chip.flops / 1e12
  return f", at least {program.ideal_seconds:.4g} s at {rate:g} TFLOP/s per device"


def _kernels(program: aot.Program, *, most: int = 30) -> Iterator[tuple[str, ...]]:
  """Yields table rows: the sum of each group of kernels, then of the `most` costliest kinds."""
  found = program.kernels()

  def row(name: str, one: hlo_kernels.HloKernel) -> tuple[str, ...]:
    sizes = (one.seconds * 1e3, one.nbytes / 1e9, one.flops / 1e12)
    milliseconds, gigabytes, teraflop = (f"{size:.3f}" for size in sizes)
    return milliseconds, f"{one.count:,}", gigabytes, teraflop, name

  every = hlo_kernels.total(found)
  speed = program.tokens / program.devices.size / every.seconds
  yield row(f"all: at most {speed:,.0f} tokens/s/device", every)
  for name, one in hlo_kernels.grouped(found, "group"):
    yield row(name, one)
  yield ("", "", "", "", "")
  for name, one in hlo_kernels.grouped(found, "kind")[:most]:
    yield row(f"{one.group}: {name}", one)
