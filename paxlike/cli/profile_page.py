# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=profile`."""

import json
from collections.abc import Iterator, Mapping

from paxlike.profiling import step_profile
from paxlike.profiling.step_profile import KINDS, StepProfile
from paxlike.telemetry import formatting
from paxlike.training.trainer import Trainer

_LARGEST = 10
# kind -> (measured, roofline) seconds.
_Sums = Mapping[str, tuple[float, float]]


def text(found: StepProfile, trainer: Trainer) -> str:
  """Returns the report as text: times per step and device, in milliseconds."""
  by_place = step_profile.sums(found.kernels, step_profile.place_of)
  by_layer = step_profile.sums(found.kernels, step_profile.layer_of)
  header = ("ms", "share", "roofline", "by kind")
  parts = [
    formatting.table(("", ""), _facts(found, trainer)),
    formatting.table(header, _by_kind(found), right=range(3)),
    _matrix("by place in the model, ms", by_place, found),
  ]
  if len(by_layer) > 1:
    parts.append(_matrix("by layer, ms", by_layer))
  header = ("ms", "share", "roofline", "runs", f"the {_LARGEST} largest kernels")
  parts.append(formatting.table(header, _largest(found), right=range(4)))
  return "\n\n".join(parts)


def as_json(found: StepProfile, trainer: Trainer) -> str:
  """Returns the report as JSON: seconds per step and device, of every kernel."""
  kernels = [
    {**one._asdict(), "scope": "/".join(one.scope), "place": step_profile.place_of(one)}
    for one in sorted(found.kernels, key=lambda one: -one.seconds)
  ]
  facts = {
    "device_kind": trainer.devices.devices.flat[0].device_kind,
    "num_devices": found.num_devices,
    "mesh": dict(trainer.devices.shape),
    "steps": found.num_steps,
    "seconds": found.seconds,
    "untraced_seconds": found.untraced_seconds,
    "idle": found.idle,
    "roofline": sum(one.roofline or 0 for one in found.kernels),
    "peak_flops": found.chip.flops,
    "peak_bandwidth": found.chip.bandwidth,
    "peaks_are_measured": found.is_measured,
    "kernels": kernels,
  }
  return json.dumps(facts)


def _facts(found: StepProfile, trainer: Trainer) -> Iterator[tuple[str, str]]:
  kind = trainer.devices.devices.flat[0].device_kind
  peaks = f"{found.chip.flops / 1e12:.4g} TFLOP/s, {found.chip.bandwidth / 1e9:.4g} GB/s"
  source = "measured here by a float32 matmul and a sum" if found.is_measured else "data sheet"
  yield "devices", f"{found.num_devices} x {kind}"
  yield "step", f"{_ms(found.seconds)} ms, mean of {found.num_steps} steps"
  if found.untraced_seconds is not None:
    yield "step before tracing", f"{_ms(found.untraced_seconds)} ms"
  yield "peaks of the roofline, per device", f"{peaks} ({source})"


def _by_kind(found: StepProfile) -> Iterator[tuple[str, ...]]:
  """Yields the rows of the kinds, which add up to the last."""
  (sums,) = step_profile.sums(found.kernels, lambda one: "").values()
  for kind in KINDS[:-1]:
    seconds, roofline = sums.get(kind, (0.0, 0.0))
    if seconds or roofline:
      yield _ms(seconds), _share(seconds, found), _ms(roofline), kind
  yield _ms(found.idle), _share(found.idle, found), "", "idle"
  roofline = sum(predicted for _, predicted in sums.values())
  yield _ms(found.seconds), _share(found.seconds, found), _ms(roofline), "all"


def _matrix(title: str, sums: Mapping[str, _Sums], found: StepProfile | None = None) -> str:
  """Returns a table with a row for each key and a column for each kind of kernel."""
  kinds = [kind for kind in KINDS if any(kind in row for row in sums.values())]

  def row(name: str, of_kinds: _Sums) -> tuple[str, ...]:
    measured = [of_kinds.get(kind, (0.0, 0.0))[0] for kind in kinds]
    roofline = sum(predicted for _, predicted in of_kinds.values())
    cells = (_ms(seconds) if seconds else "" for seconds in measured)
    return *cells, _ms(sum(measured)), _ms(roofline), name

  def key(item: tuple[str, _Sums]) -> float:
    return -sum(seconds for seconds, _ in item[1].values())

  order = sorted(sums.items(), key=key) if found is not None else sums.items()
  rows = [row(name, of_kinds) for name, of_kinds in order]
  if found is not None:
    rows.append((*[""] * len(kinds), _ms(found.idle), "", "idle"))
  header = (*kinds, "all", "roofline", title)
  return formatting.table(header, rows, right=range(len(header) - 1))


def _largest(found: StepProfile) -> Iterator[tuple[str, ...]]:
  """Yields the kernels with the largest measured times; those of all layers are one."""
  sums: dict[str, list[float]] = {}
  for one in found.kernels:
    row = sums.setdefault(step_profile.title_of(one), [0.0, 0.0, 0.0])
    for column, value in enumerate((one.seconds, one.roofline or 0.0, one.count)):
      row[column] += value
  rows = sorted(sums.items(), key=lambda item: -item[1][0])[:_LARGEST]
  for title, (seconds, roofline, count) in rows:
    yield _ms(seconds), _share(seconds, found), _ms(roofline), f"{count:.0f}", title


def _ms(seconds: float) -> str:
  return f"{seconds * 1e3:.3f}"


def _share(seconds: float, found: StepProfile) -> str:
  return f"{seconds / found.seconds:.1%}"
