# SPDX-License-Identifier: Apache-2.0
"""The kernels of a step: where in the model, of what kind, and measured and roofline times."""

import itertools
import re
from collections.abc import Callable, Iterable, Set
from typing import NamedTuple

import jax

from paxlike.compilation import hlo_kernels
from paxlike.compilation.hlo_kernels import HloKernel
from paxlike.compilation.hlo_text import Computations, computations
from paxlike.devices import chips, kernel_rates
from paxlike.devices.chips import Chip
from paxlike.devices.kernel_rates import KernelRates
from paxlike.errors import UserError
from paxlike.profiling import cpu_peaks, timeline, trace
from paxlike.profiling.measurement import Measurement

#: In the order of tables; `idle` is the time in which no kernel runs.
KINDS = ("matmul", "attention", "collectives", "memory-bound", "idle")

_ATTENTION = "dot_product_attention"  # The scope of attention kernels in layers.
# Wrappers of JAX's transforms around scopes, such as transpose(jvp(layer_0)), and the parts of an
# op_name that JAX adds.
_WRAPPED = re.compile(r"(?:\w+\()*([\w.\- ]*)\)*")
_OF_JAX = re.compile(
  r"jit|while|body|cond|closed_call|checkpoint|remat\d*|rematted_computation|pjit|scan|shard_map"
  r"|custom_[jv]vp_call\w*|branch_\d+_fun|core_call|main|"
)


class Kernel(NamedTuple):
  """One instruction, or the sum of several; times are per step and device, in seconds.

  Attributes:
    name: The instruction.
    scope: Where in the model, such as ("layer_3", "attention", "query").
    kind: One of KINDS.
    is_backward: Whether it is of the backward pass.
    label: What it computes, as in `--mode=compile --kernels`.
    count: Runs.
    seconds: Its share of the step's time; see `timeline.divide`.
    busy: Its duration, during which others may run too.
    roofline: The predicted duration; None: the program's text has no such kernel.
  """

  name: str
  scope: tuple[str, ...]
  kind: str
  is_backward: bool
  label: str
  count: float
  seconds: float
  busy: float
  roofline: float | None


class StepProfile(NamedTuple):
  """Where the time of a step goes, per step and device.

  Attributes:
    kernels: Those of the program; their `seconds` and `idle` add up to `seconds`.
    seconds: Time per step while tracing.
    untraced_seconds: Time per step without tracing; None: not measured.
    idle: Seconds in which no kernel runs.
    num_steps: Traced steps.
    num_devices: Devices of this process, over which times are averaged.
    chip: The peaks that the roofline assumes.
    is_measured: Whether `chip` was measured, not looked up in a data sheet.
    microseconds: Instruction -> mean duration, for `pgle`.
  """

  kernels: list[Kernel]
  seconds: float
  untraced_seconds: float | None
  idle: float
  num_steps: int
  num_devices: int
  chip: Chip
  is_measured: bool
  microseconds: dict[str, float]


def check(devices: jax.sharding.Mesh):
  """Checks that steps on these devices can be profiled.

  Raises:
    UserError: They are of another kind than CPUs and NVIDIA GPUs, or without a data sheet.
  """
  device = devices.devices.flat[0]
  chip = chips.find(device.device_kind)
  if device.platform != "cpu" and (chip is None or not chip.is_gpu):
    raise UserError(
      f"--mode=profile reads traces of CPUs and NVIDIA GPUs, not of {device.device_kind}:"
      " PROFILE_STEPS writes a trace of any device, for xprof."
    )


def of(measurement: Measurement, devices: jax.sharding.Mesh) -> StepProfile:
  """Returns the profile of a measured step."""
  device = devices.devices.flat[0]
  local = [one for one in devices.devices.flat if one.process_index == jax.process_index()]
  sheet = chips.find(device.device_kind)
  if sheet is not None:
    chip, rates = sheet, kernel_rates.of_chip(sheet)
  else:
    chip, rates = cpu_peaks.measure(len(local))
  return combine(
    measurement,
    trace.read(measurement.folder, module_name(measurement.program)),
    chip=chip,
    rates=rates,
    is_measured=sheet is None,
  )


def module_name(program: str) -> str:
  """Returns the name of a program, given its HLO text."""
  match = re.match(r"HloModule ([\w.\-]+)", program)
  assert match is not None
  return match[1]


def combine(
  measurement: Measurement,
  intervals: list[trace.Interval],
  *,
  chip: Chip,
  rates: KernelRates,
  is_measured: bool,
) -> StepProfile:
  """Returns measured times beside roofline times on a chip."""
  found = {one.name: one for one in hlo_kernels.kernels(measurement.program, chip, rates)}
  program = computations(measurement.program)
  sources = {one.name: one.op_name for lines in program.values() for one in lines}
  sources |= {name: kernel.source for name, kernel in found.items()}
  outer = _containers(program, {one.name for one in intervals})
  kinds = {name: _kind(kernel) for name, kernel in found.items()}
  runs = [one for one in intervals if one.name not in outer]
  measured = timeline.divide(runs, is_hidden=lambda name: kinds.get(name) == "collectives")
  num_devices = len({one.device for one in intervals})
  per = 1 / (measurement.num_steps * num_devices)
  kernels, microseconds = [], {}
  for name in {**found, **measured.times}:
    kernel = found.get(name)
    count, busy, exposed = measured.times.get(name, (0, 0.0, 0.0))
    if count:
      microseconds[name] = 1e6 * busy / count
    kernels.append(
      Kernel(
        name,
        scope_of(sources.get(name, "")),
        kinds.get(name, "memory-bound"),
        "transpose(" in sources.get(name, ""),
        kernel.kind if kernel is not None else "",
        count * per,
        exposed * per,
        busy * per,
        kernel.count * kernel.seconds if kernel is not None else None,
      )
    )
  return StepProfile(
    kernels,
    measured.total * per,
    measurement.untraced_seconds,
    measured.idle * per,
    measurement.num_steps,
    num_devices,
    chip,
    is_measured,
    microseconds,
  )


def _containers(program: Computations, traced: Set[str]) -> set[str]:
  """Returns the instructions that run others which are `traced`: their time is that of the others.

  XLA for CPUs may compile a small loop into one kernel.
  """
  outer = set()
  for one in (one for lines in program.values() for one in lines):
    if one.operation in hlo_kernels.BRANCHES:
      inner = (other.name for called in one.called for other in program.get(called, ()))
      if not traced.isdisjoint(inner):
        outer.add(one.name)
  return outer


def _kind(kernel: HloKernel) -> str:
  if kernel.group == "communication":
    return "collectives"
  if kernel.group == "attention" or _ATTENTION in scope_of(kernel.source):
    return "attention"
  return "matmul" if kernel.group.startswith("matmul") else "memory-bound"


def scope_of(source: str) -> tuple[str, ...]:
  """Returns the named scopes in an `op_name`, without what JAX adds and without the primitive.

  Of an instruction that XLA combined from several, a/(b/mul:c/add), those that all have, or else
  ("several",).
  """
  head, _, combined = source.partition("/(")
  if combined:
    scopes = [scope_of(f"{head}/{part}") for part in combined.split(":")]
    shared = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*scopes, strict=False))
    return tuple(names[0] for names in shared) or ("several",)
  names: list[str] = []
  for part in source.split("/")[:-1]:
    match = _WRAPPED.fullmatch(part)
    name = match[1].strip() if match is not None else ""
    if part.startswith("jit(") or _OF_JAX.fullmatch(name) or names[-1:] == [name]:
      continue
    names.append(name)
  return tuple(names)


def place_of(kernel: Kernel) -> str:
  """Returns where in the model a kernel is, with all layers alike: "layers/attention"."""
  names = [re.sub(r"^layer_\d+$", "layers", name) for name in kernel.scope]
  return "/".join(names[: 2 if names[:1] == ["layers"] else 1]) or "other"


def title_of(kernel: Kernel) -> str:
  """Returns the scope and label of a kernel, with all layers alike."""
  names = [re.sub(r"^layer_\d+$", "layers", name) for name in kernel.scope]
  place = "/".join(names) or "other"
  return f"{place}{' (backward)' if kernel.is_backward else ''}: {kernel.label or kernel.name}"


def layer_of(kernel: Kernel) -> str | None:
  """Returns the layer of a kernel in an unrolled stack, such as "layer_3"; None: in none."""
  return next((name for name in kernel.scope if re.fullmatch(r"layer_\d+", name)), None)


def sums(
  kernels: Iterable[Kernel], key: Callable[[Kernel], str | None]
) -> dict[str, dict[str, tuple[float, float]]]:
  """Returns key -> kind -> (measured, roofline) seconds, without kernels whose key is None."""
  found: dict[str, dict[str, tuple[float, float]]] = {}
  for one in kernels:
    if (name := key(one)) is not None:
      of_name = found.setdefault(name, {})
      seconds, roofline = of_name.get(one.kind, (0.0, 0.0))
      of_name[one.kind] = seconds + one.seconds, roofline + (one.roofline or 0.0)
  return found
