# SPDX-License-Identifier: Apache-2.0
"""Plots the curves of runs: `paxlike-plot RUN... [--output=FILE.png]`.

`paxlike-plot --plan FILE...` plots plans instead; see `plan_plot`.
"""

import io
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from etils import epath

from paxlike import file_io, run_folder
from paxlike.cli import figures
from paxlike.errors import UserError
from paxlike.telemetry import console, run_paths, run_records

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

MEAN_FROM = 50  # Least number of values for a running mean; its window is 1/25 of them.


class Curve(NamedTuple):
  """A metric over updates, without missing or non-finite values."""

  updates: list[int]
  values: list[float]


class PlottedRun(NamedTuple):
  """The curves of one run.

  Attributes:
    name: Its label.
    loss: The training loss.
    eval_losses: Eval set -> loss.
    tokens_per_second: The training throughput of all devices.
  """

  name: str
  loss: Curve
  eval_losses: dict[str, Curve]
  tokens_per_second: Curve


def main() -> int:
  """Entry point of the `paxlike-plot` command. Returns the exit status."""
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, or 2 for a user error."""
  return console.exit_status("paxlike-plot", lambda: _plot(argv))


def _plot(argv: Sequence[str]) -> int:
  parser = console.Parser(
    prog="paxlike-plot",
    description="Plots the loss and throughput of one or several runs, or plans.",
  )
  run_paths.add_argument(parser)
  parser.add_argument(
    "--output",
    metavar="FILE.png",
    type=console.path,
    help="default: RUN/curves.png, curves.png, or with --plan plans.png",
  )
  parser.add_argument(
    "--plan",
    action="store_true",
    help="plot files of paxlike --mode=plan --topology=NAME,NAME... --json instead of runs",
  )
  options = parser.parse_args(argv)
  if options.plan:
    from paxlike.cli import plan_plot

    found = [series for path in options.runs for series in plan_plot.read(path)]
    output = options.output or "plans.png"
    save(plan_plot.draw(found), output)
    print(output)
    return 0
  output = options.output or run_paths.default_output(options.runs, "curves.png")
  paths = [path for given in options.runs for path in run_paths.within(given)]
  names = run_paths.names(paths)
  runs = [read(path, name=name) for path, name in zip(paths, names, strict=True)]
  save(draw(runs), output)
  print(output)
  return 0


def read(path: str, *, name: str) -> PlottedRun:
  """Reads the metrics of the run in folder `path`.

  Raises:
    UserError: There are none.
  """
  run_paths.check(path)
  folder = epath.Path(path)
  with run_folder.reading(path):
    records = run_records.read(folder)
  train = [record for record in records if record.get("kind") == "train"]
  evals: dict[str, list[dict[str, Any]]] = {}
  for record in records:
    if record.get("kind") == "eval":
      evals.setdefault(record["set"], []).append(record)
  found = PlottedRun(
    name,
    _curve(train, "loss"),
    {set_: _curve(rows, "loss") for set_, rows in sorted(evals.items())},
    _curve(train, "tokens_per_second"),
  )
  if not any(curve.values for curve in (found.loss, *found.eval_losses.values())):
    raise UserError(f"{path} has no loss yet.")
  return found


def draw(runs: Sequence[PlottedRun]) -> "Figure":
  """Plots the curves, with a colour per run, or per curve if there is a single run.

  Raises:
    UserError: matplotlib is not installed.
  """
  figure = figures.empty()
  if len(runs) == 1:
    _draw_one(figure, runs[0])
  else:
    _draw_several(figure, runs)
  if any(len(run_.loss.values) >= MEAN_FROM for run_ in runs):
    style = {"fontsize": 9, "color": figures.INK}
    figure.axes[0].set_title("solid lines: running means", loc="right", **style)
  return figure


def save(figure: "Figure", output: str):
  """Writes a PNG file atomically.

  Raises:
    UserError: It cannot be written.
  """
  path = epath.Path(output)
  if file_io.is_remote(output):
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    try:
      path.write_bytes(picture.getvalue())
    except file_io.failures() as error:
      raise UserError(f"{output} cannot be written: {file_io.reason(error)}.") from error
    return
  temporary = path.with_name(file_io.unique(path.name))
  try:
    with temporary.open("wb") as file:
      figure.savefig(file, format="png")
    temporary.replace(path)
  except OSError as error:
    temporary.unlink(missing_ok=True)
    raise UserError(f"{output} cannot be written: {error.strerror or error}.") from None


def _curve(records: Iterable[dict[str, Any]], key: str) -> Curve:
  found = [(record["updates"], record.get(key)) for record in records]
  points = [(updates, value) for updates, value in found if isinstance(value, int | float)]
  return Curve([updates for updates, _ in points], [value for _, value in points])


def _draw_one(figure: "Figure", run_: PlottedRun):
  figure.set_size_inches(10, 7.5)
  loss, speed = figure.subplots(2, sharex=True, height_ratios=[2, 1])
  of_curves = figures.colors(2 + len(run_.eval_losses))
  _draw_training(loss, run_.loss, of_curves[0], label="train", raw=True)
  for number, (name, curve) in enumerate(run_.eval_losses.items()):
    _draw_eval(loss, curve, of_curves[1 + number], number, label=name)
  _draw_training(speed, run_.tokens_per_second, of_curves[0], label=None, raw=True)
  figures.frame(loss, "loss")
  _draw_speed(speed)
  loss.legend(title="loss at the end", frameon=False, labelcolor=figures.INK)
  loss.set_title(run_.name, color=figures.INK)


def _draw_several(figure: "Figure", runs: Sequence[PlottedRun]):
  sets = sorted({name for run_ in runs for name in run_.eval_losses})
  figure.set_size_inches(13, 10 if sets else 7.5)
  panels = figure.subplots(
    3 if sets else 2, sharex=True, height_ratios=[3, 3, 2][-2 - bool(sets) :]
  )
  loss, speed = panels[0], panels[-1]
  raw = len(runs) <= 3  # More would hide the means.
  for run_, color in zip(runs, figures.colors(len(runs)), strict=True):
    _draw_training(loss, run_.loss, color, label=run_.name, raw=raw)
    for name, curve in run_.eval_losses.items():
      _draw_eval(panels[1], curve, color, sets.index(name), label=None)
    _draw_training(speed, run_.tokens_per_second, color, label=None, raw=raw)
  figures.frame(loss, "training loss")
  handles, labels = loss.get_legend_handles_labels()
  outside = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False}
  loss.legend(handles, labels, title="loss at the end", labelcolor=figures.INK, **outside)
  if sets:
    figures.frame(panels[1], "evaluation loss")
    for number, name in enumerate(sets):
      _draw_eval(panels[1], Curve([], []), figures.INK, number, label=name)
    panels[1].legend(labelcolor=figures.INK, **outside)
  _draw_speed(speed)
  loss.set_title(f"{len(runs)} runs", color=figures.INK)


def _draw_training(axes: "Axes", curve: Curve, color: Any, *, label: str | None, raw: bool):
  mean = _running_mean(curve)
  if label is not None and curve.values:
    label = f"{label}  {mean.values[-1]:.3f}"
  if raw and mean != curve:
    axes.plot(*curve, color=color, linewidth=0.7, alpha=0.35)
  marker = "o" if len(curve.values) == 1 else None  # A line of one point is invisible.
  axes.plot(*mean, color=color, linewidth=1.6, marker=marker, label=label)


def _draw_eval(axes: "Axes", curve: Curve, color: Any, number: int, *, label: str | None):
  if label is not None and curve.values:
    label = f"{label}  {curve.values[-1]:.3f}"
  style = {"linestyle": "--", "linewidth": 1.2, "marker": "osD^v"[number % 5], "markersize": 4.5}
  axes.plot(*curve, color=color, label=label, **style)


def _running_mean(curve: Curve) -> Curve:
  """Returns the running mean of a curve."""
  num_values = len(curve.values)
  half = num_values // MEAN_FROM
  sums = [0.0, *itertools.accumulate(curve.values)]
  means = []
  for place, value in enumerate(curve.values):
    # At the start the window is symmetric, so that the steep descent is not distorted. At the end,
    # where curves are flat, it is not, so that the last mean is over many values.
    before, after = min(half, place), min(half, place, num_values - 1 - place)
    mean = (sums[place + after + 1] - sums[place - before]) / (before + after + 1)
    means.append(mean if before else value)
  return Curve(curve.updates, means)


def _draw_speed(axes: "Axes"):
  import matplotlib.ticker

  figures.frame(axes, "tokens per second")
  axes.set_ylim(bottom=0)
  axes.set_xlim(left=0)
  axes.set_xlabel("updates", color=figures.INK)
  axes.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
  axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
  axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))


if __name__ == "__main__":
  sys.exit(main())
