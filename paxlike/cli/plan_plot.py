# SPDX-License-Identifier: Apache-2.0
"""Plots how predicted steps scale: `paxlike-plot --plan FILE...`, of `--mode=plan --json`.

A file holds the plans of several topologies, such as h100-8,h100-64,h100-512. With
`--global_batch`, they share a batch and show strong scaling; without, batches grow with the
devices, and they show weak scaling.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paxlike import file_io
from paxlike.cli import figures
from paxlike.errors import UserError

if TYPE_CHECKING:
  from matplotlib.figure import Figure


class Point(NamedTuple):
  """The best plan of a topology.

  Attributes:
    devices: Their number.
    seconds: The predicted time of a step.
    error: The expected error of it, as a fraction.
    mfu: Model FLOPs utilization, counting full attention.
    nbytes: The predicted peak memory of a device.
    capacity: The memory of a device for programs.
    sequences: The global batch.
  """

  devices: int
  seconds: float
  error: float
  mfu: float
  nbytes: float
  capacity: float
  sequences: int


class Series(NamedTuple):
  """Plans on more and more devices of one kind, which differ in nothing else.

  Attributes:
    name: What stands beside its line.
    points: By number of devices.
  """

  name: str
  points: tuple[Point, ...]

  @property
  def is_strong(self) -> bool:
    """Whether all have the same global batch."""
    return len({point.sequences for point in self.points}) == 1


def read(path: str) -> list[Series]:
  """Returns the plans in a file, by kind of device; topologies that nothing fits are left out.

  Raises:
    UserError: It cannot be read, is something else, or holds no plan.
  """
  stem = path.rpartition("/")[2].removesuffix(".json")
  found = file_io.parse_output(
    path, lambda facts: _series(facts, stem), name=path, of="--mode=plan --json"
  )
  if not found:
    raise UserError(f"{path} has no plan that fits.")
  return found


def _series(facts: dict[str, Any], stem: str) -> list[Series]:
  of_kind: dict[str, list[Point]] = {}
  for one in facts.get("topologies", [facts]):
    if not one["plans"]:
      continue
    plan = next((plan for plan in one["plans"] if plan["fits"]), None)
    if plan is None:
      continue
    of_kind.setdefault(one["device_kind"], []).append(
      Point(
        devices=one["num_devices"],
        seconds=plan["seconds"]["total"],
        error=plan["expected_error"],
        mfu=plan["mfu_full"],
        nbytes=plan["predicted_bytes"]["total"],
        capacity=one["bytes_of_device"],
        sequences=one["sequences_per_step"],
      )
    )
  return [Series(f"{kind}, {stem}", tuple(sorted(points))) for kind, points in of_kind.items()]


def draw(found: Sequence[Series]) -> "Figure":
  """Plots seconds, MFU and memory over the number of devices.

  Raises:
    UserError: matplotlib is not installed.
  """
  figure = figures.empty()
  figure.set_size_inches(9, 10)
  time, mfu, memory = figure.subplots(3, sharex=True, height_ratios=[3, 2, 2])
  for series, color in zip(found, figures.colors(len(found)), strict=True):
    points = series.points
    devices = [point.devices for point in points]
    style = {"color": color, "marker": "o", "markersize": 4}
    seconds = [point.seconds for point in points]
    time.plot(devices, seconds, label=_label(series), **style)
    time.fill_between(
      devices,
      [point.seconds * (1 - point.error) for point in points],
      [point.seconds * (1 + point.error) for point in points],
      color=color,
      alpha=0.15,
      linewidth=0,
    )
    if series.is_strong and len(points) > 1:
      ideal = [seconds[0] * devices[0] / count for count in devices]
      time.plot(devices, ideal, color=color, linestyle=":", linewidth=1)
    mfu.plot(devices, [100 * point.mfu for point in points], **style)
    memory.plot(devices, [point.nbytes / 1e9 for point in points], **style)
    capacity = [point.capacity / 1e9 for point in points]
    memory.plot(devices, capacity, color=color, linestyle="--", linewidth=1)
  _axes(time, mfu, memory)
  ideal = "; dotted: ideal" if any(series.is_strong for series in found) else ""
  time.set_title(f"bands: mean errors{ideal}", loc="right", fontsize=9, color=figures.INK)
  return figure


def _label(series: Series) -> str:
  first = series.points[0]
  if series.is_strong:
    return f"{series.name}: {first.sequences:,} sequences a step"
  return f"{series.name}: {first.sequences / first.devices:g} sequences a device"


def _axes(time: Any, mfu: Any, memory: Any):
  import matplotlib.ticker

  figures.frame(time, "predicted seconds of a step")
  figures.frame(mfu, "MFU, %")
  figures.frame(memory, "GB of a device (dashed: for programs)")
  time.set_yscale("log")
  time.set_xscale("log", base=2)
  time.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
  time.legend(frameon=False, labelcolor=figures.INK)
  for panel in (mfu, memory):
    panel.set_ylim(bottom=0)
  memory.set_xlabel("devices", color=figures.INK)
  memory.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
