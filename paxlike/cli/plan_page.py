# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=plan`."""

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from paxlike.config.knob_text import spell
from paxlike.devices.mesh import AXES
from paxlike.planning import planner
from paxlike.planning.planner import Plan, Plans
from paxlike.telemetry import formatting

# Plan -> the command line that runs it.
Command = Callable[[Plan], str]
_SHOWN = 8


class Run(NamedTuple):
  """A training run on a topology, and its plans.

  Attributes:
    topology: The name of the topology; None: this machine's devices.
    plans: The plans.
    command: See `Command`.
    tokens: The length of the run; None: unknown.
    price: The price of a device-hour; None: unknown.
  """

  topology: str | None
  plans: Plans
  command: Command
  tokens: float | None = None
  price: float | None = None

  @property
  def cost(self) -> float | None:
    """What 10^9 tokens cost by the first plan; None: nothing fits, or there is no price."""
    if self.price is None or self.plans.first is None:
      return None
    return self.price * self.device_hours(1e9)

  def device_hours(self, tokens: float) -> float:
    """Returns the device-hours of so many tokens by the first plan."""
    assert self.plans.first is not None
    seconds = tokens / self.plans.tokens_per_second(self.plans.first)
    return seconds / 3600 * self.plans.num_devices


def text(run: Run) -> str:
  """Returns the report as text."""
  plans = run.plans
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
    parts.append("\n  ".join(["fastest:", *_fastest(run, plans.first)]))
  parts.append(
    "The fastest configuration of each mesh. Sizes in parentheses are across slices or nodes; MFU"
    "\ncounts full attention. GB per device and s per step are predicted; +- is the mean error of"
    "\nsuch predictions of published steps, and = marks plans that may be as fast as the first."
    f"\nConfigurations that take more than {planner.MAX_SHARE:.0%} of the memory for programs are"
    " left out.\n"
    "--confirm=K compiles the best K."
  )
  return "\n\n".join(parts)


_RIGHT = ("microbatches", "GB", "GB compiled", "s", "+-", "MFU", "tokens/s", "sequences")
_RIGHT += ("tokens/s/device", "cost of 10^9 tokens", "days", "cost")


def compared(runs: Sequence[Run], *, by_cost: bool) -> str:
  """Returns a table of the best plan of each topology, by time or by cost, and the first's page."""
  runs = _sorted(runs, by_cost=by_cost)
  header = ["topology", "mesh", "sequences", "GB", "s", "+-", "MFU", "tokens/s", "tokens/s/device"]
  header += ["cost of 10^9 tokens"] * any(run.price is not None for run in runs)
  if any(run.tokens is not None for run in runs):
    header += ["days", *["cost"] * any(run.price is not None for run in runs)]
  rows = [_compared_row(run, is_tie=_is_tie(run, runs[0], by_cost=by_cost)) for run in runs]
  rows = [(*row, *[""] * (len(header) - len(row))) for row in rows]
  numbers = [place for place, name in enumerate(header) if name in _RIGHT]
  what = "costs least" if by_cost else "is fastest"
  first = f"= marks what may be as good as the first. {runs[0].topology} {what}:"
  if runs[0].plans.first is None:
    first = f"Nothing fits on any of them. {runs[0].topology}:"
  return "\n\n".join(
    [
      formatting.table(header, rows, right=numbers),
      first,
      text(runs[0]),
    ]
  )


def _sorted(runs: Sequence[Run], *, by_cost: bool) -> list[Run]:
  """Returns runs, the best first; those that do not fit last."""

  def key(run: Run) -> tuple[bool, float]:
    if run.plans.first is None:
      return True, 0.0
    return False, _measure(run, by_cost=by_cost)

  return sorted(runs, key=key)


def _measure(run: Run, *, by_cost: bool) -> float:
  """Returns what a run is compared by: its cost, or the time of a token."""
  assert run.plans.first is not None
  if by_cost and run.cost is not None:
    return run.cost
  return 1 / run.plans.tokens_per_second(run.plans.first)


def _is_tie(run: Run, best: Run, *, by_cost: bool) -> bool:
  """Returns whether a run may be as good as the best: they differ by less than the errors."""
  first, second = best.plans.first, run.plans.first
  if first is None or second is None:
    return False
  most = _measure(best, by_cost=by_cost) * (1 + best.plans.error(first))
  return _measure(run, by_cost=by_cost) * (1 - run.plans.error(second)) <= most


def _compared_row(run: Run, *, is_tie: bool) -> tuple[str, ...]:
  plans, plan = run.plans, run.plans.first
  if plan is None:
    needs = f"{plans.nearest.memory.total / 1e9:.2f}"
    return str(run.topology), "nothing fits", f"{plans.batch:,}", needs
  rate = plans.tokens_per_second(plan)
  cells = [
    str(run.topology),
    _mesh(plan),
    f"{plans.batch:,}",
    f"{plan.memory.total / 1e9:.2f}",
    f"{plan.times.total:.3f}",
    f"{plans.error(plan):.0%}{' =' if is_tie else '  '}",
    f"{100 * plans.mfu(plan):.1f} %",
    f"{rate:,.0f}",
    f"{rate / plans.num_devices:,.0f}",
  ]
  cells += [] if run.cost is None else [f"{run.cost:,.2f}"]
  if run.tokens is not None:
    whole = _whole(run, run.tokens)
    cells += [f"{whole['days']:,.1f}"]
    cells += [] if whole["cost"] is None else [f"{whole['cost']:,.0f}"]
  return tuple(cells)


def _fastest(run: Run, plan: Plan) -> Iterator[str]:
  """Yields the command line of the fastest plan, why it is, and what a run takes."""
  yield run.command(plan)
  if (reason := run.plans.reason()) is not None:
    yield reason
  if run.cost is not None:
    yield f"10^9 tokens cost {run.cost:,.2f}, at {run.price:g} for a device-hour"
  if run.tokens is not None:
    whole = _whole(run, run.tokens)
    cost = "" if run.price is None else f"; they cost {whole['cost']:,.0f} at {run.price:g} each"
    hours = f"{whole['device_hours']:,.0f} device-hours"
    yield f"{run.tokens:.4g} tokens: {whole['days']:.1f} days, {hours}{cost}"


def _whole(run: Run, tokens: float) -> dict[str, Any]:
  """Returns the days, device-hours and cost of all tokens."""
  hours = run.device_hours(tokens)
  days = hours / run.plans.num_devices / 24
  cost = None if run.price is None else run.price * hours
  return {"tokens": tokens, "days": days, "device_hours": hours, "cost": cost}


def facts(run: Run) -> dict[str, Any]:
  """Returns the report for JSON: sizes in bytes, times in seconds."""
  plans, model = run.plans, run.plans.model
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
    "plans": [_plan_facts(plans, plan, run.command) for plan in plans.best],
    "reason": plans.reason(),
    "cost_of_billion_tokens": run.cost,
    "run": _whole(run, run.tokens) if run.tokens and plans.first else None,
    "nearest": None if plans.best else _plan_facts(plans, plans.nearest, run.command),
  }


def compared_facts(runs: Sequence[Run], *, by_cost: bool) -> dict[str, Any]:
  """Returns the reports of several topologies for JSON, in the order of `compared`."""
  runs = _sorted(runs, by_cost=by_cost)
  return {
    "target": "cost" if by_cost else "time",
    "topologies": [
      {
        "topology": run.topology,
        "tie": _is_tie(run, runs[0], by_cost=by_cost),
        **facts(run),
      }
      for run in runs
    ],
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
