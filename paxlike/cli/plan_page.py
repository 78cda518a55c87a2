# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=plan`."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from paxlike.config.knob_text import spell
from paxlike.devices.mesh import AXES
from paxlike.planning import planner
from paxlike.planning.planner import Plan, Plans
from paxlike.telemetry import formatting

# Plan -> the command line that runs it.
Command = Callable[[Plan], str]
_SHOWN = 8


def text(
  plans: Plans, command: Command, tokens: float | None = None, price: float | None = None
) -> str:
  """Returns the report as text; of a run on so many `tokens`, at the `price` of a device-hour."""
  parts = [formatting.table(("", ""), _facts(plans))]
  shown = plans.best[:_SHOWN] or (plans.nearest,)
  is_confirmed = any(plan.compiled is not None for plan in shown)
  header = ["mesh", "microbatches", "schedule", "remat", "GB", "s", "+-", "MFU", "tokens/s"]
  header += ["bound by"]
  if is_confirmed:
    header.insert(5, "GB compiled")
  numbers = [place for place, name in enumerate(header) if name in _RIGHT]
  rows = [_row(plans, plan, is_confirmed=is_confirmed) for plan in shown]
  if not plans.best:
    parts.append("nothing fits; the configuration that needs the least memory:")
  parts.append(formatting.table(header, rows, right=numbers))
  if plans.first is not None:
    parts.append("\n  ".join(["fastest:", *_fastest(plans, plans.first, command, tokens, price)]))
  parts.append(
    "The fastest configuration of each mesh. Sizes in parentheses are across slices or nodes; MFU"
    "\ncounts full attention. GB per device and s per step are predicted; +- is the mean error of"
    "\nsuch predictions of published steps, and = marks plans that may be as fast as the first."
    f"\nConfigurations that take more than {planner.MAX_SHARE:.0%} of the memory for programs are"
    " left out.\n"
    "--confirm=K compiles the best K."
  )
  return "\n\n".join(parts)


_RIGHT = ("microbatches", "GB", "GB compiled", "s", "+-", "MFU", "tokens/s")


def _fastest(
  plans: Plans, plan: Plan, command: Command, tokens: float | None, price: float | None
) -> Iterator[str]:
  """Yields the command line of the fastest plan, why it is, and what a run takes."""
  yield command(plan)
  if (reason := plans.reason()) is not None:
    yield reason
  if tokens is not None:
    run = _run(plans, plan, tokens, price)
    cost = "" if price is None else f", at {price:g} each {run['cost']:,.0f}"
    yield (
      f"{tokens:.4g} tokens: {run['days']:.1f} days, {run['device_hours']:,.0f} device-hours{cost}"
    )


def _run(plans: Plans, plan: Plan, tokens: float, price: float | None) -> dict[str, Any]:
  """Returns the days, device-hours and cost of a run on so many tokens."""
  seconds = tokens / plans.tokens_per_second(plan)
  hours = seconds / 3600 * plans.num_devices
  cost = None if price is None else price * hours
  return {"tokens": tokens, "days": seconds / 86400, "device_hours": hours, "cost": cost}


def facts(
  plans: Plans, command: Command, tokens: float | None = None, price: float | None = None
) -> dict[str, Any]:
  """Returns the report for JSON: sizes in bytes, times in seconds."""
  model = plans.model
  return {
    "parameters": model.num_params,
    "device_kind": plans.device_kind,
    "num_devices": plans.num_devices,
    "bytes_of_device": plans.machine.chip.usable_memory,
    "rates": dataclasses.asdict(plans.machine.rates),
    "sequences_per_step": plans.batch,
    "tokens_per_step": plans.batch * model.seq_len,
    "flops_per_step": plans.batch * model.seq_len * model.flops.full,
    "considered": plans.considered,
    "fitting": plans.fitting,
    "plans": [_plan_facts(plans, plan, command) for plan in plans.best],
    "reason": plans.reason(),
    "run": _run(plans, plans.first, tokens, price) if tokens and plans.first else None,
    "nearest": None if plans.best else _plan_facts(plans, plans.nearest, command),
  }


def flags(plan: Plan, given: dict[str, Any]) -> Iterator[str]:
  """Yields the flags that select a plan, except for knobs that already have its values."""
  for name, value in plan.how.knobs.items():
    if value != given.get(name):
      yield shlex.quote(f"--fdl.{name}={spell(value)}")


def _facts(plans: Plans) -> Iterator[tuple[str, str]]:
  tokens = plans.batch * plans.model.seq_len
  usable = formatting.nbytes(plans.machine.chip.usable_memory)
  yield "parameters", f"{plans.model.num_params:,}"
  yield "devices", f"{plans.num_devices} x {plans.device_kind}, {usable} each for programs"
  yield "global batch", f"{plans.batch:,} sequences = {tokens:,} tokens"
  yield "FLOPs per step", f"{tokens * plans.model.flops.full:.4g}"
  yield "configurations", f"{plans.considered:,}, of which {plans.fitting:,} fit"


def _row(plans: Plans, plan: Plan, *, is_confirmed: bool) -> tuple[str, ...]:
  how, pipeline = plan.how, plan.how.pipeline
  schedule = ""
  if pipeline is not None:
    chunks = f" x {pipeline.chunks}" if pipeline.chunks > 1 else ""
    schedule = f"{pipeline.schedule}{chunks}{', recompute' if pipeline.recompute else ''}"
  compiled = []
  if is_confirmed:
    held = plan.compiled
    peak = "" if held is None else f"{held.peak / 1e9:.2f}"
    compiled = [peak if plan.fits else f"{peak}: does not fit"]
  return (
    _mesh(plan),
    str(how.microbatches),
    schedule,
    how.remat.name,
    f"{plan.memory.total / 1e9:.2f}",
    *compiled,
    f"{plan.times.total:.3f}",
    f"{plans.error(plan):.0%}{' =' if plans.is_tie(plan) else '  '}",
    f"{100 * plans.mfu(plan):.1f} %",
    f"{plans.tokens_per_second(plan):,.0f}",
    _bound(plan),
  )


def _mesh(plan: Plan) -> str:
  axes = []
  for axis, inner, outer in zip(AXES, plan.how.ici, plan.how.dcn, strict=True):
    if inner * outer > 1:
      within = f" {inner}" if inner > 1 else ""
      axes.append(f"{axis}{within}{f' ({outer})' if outer > 1 else ''}")
  return ", ".join(axes) or "one device"


def _bound(plan: Plan) -> str:
  part = plan.times.bound
  seconds = plan.times.parts[part]
  return f"{part} {seconds / plan.times.total:.0%}"


def _plan_facts(plans: Plans, plan: Plan, command: Command) -> dict[str, Any]:
  how = plan.how
  return {
    "mesh": {"ici": _named(how.ici), "dcn": _named(how.dcn)},
    "microbatches": how.microbatches,
    "knobs": how.knobs,
    "command": command(plan),
    "predicted_bytes": {**dataclasses.asdict(plan.memory), "total": plan.memory.total},
    "compiled_bytes": None if plan.compiled is None else plan.compiled._asdict(),
    "fits": plan.fits,
    "seconds": {**plan.times.parts, "total": plan.times.total},
    "expected_error": plans.error(plan),
    "tie": plans.is_tie(plan),
    "bound_by": plan.times.bound,
    "mfu_full": plans.mfu(plan),
    "mfu_causal": plans.mfu(plan, causal=True),
    "tokens_per_second": plans.tokens_per_second(plan),
  }


def _named(sizes: tuple[int, ...]) -> dict[str, int]:
  return {axis: size for axis, size in zip(AXES, sizes, strict=True) if size > 1}
