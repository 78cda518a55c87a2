# SPDX-License-Identifier: Apache-2.0
"""A live loss curve in a notebook."""

import io
import time
from typing import Any

from etils import epath

from paxlike.telemetry import metric_files
from paxlike.telemetry.callbacks import Callback
from paxlike.telemetry.console import in_notebook

_SHARE = 0.03  # The largest share of the run's time that is spent on drawing.
_INCHES, _DPI = (5.0, 2.4), 80


class LossCurve(Callback):
  """Draws the losses below the cell that trains: at each summary interval, and at the end."""

  def __init__(self, display: Any):
    """`display` is `IPython.display`."""
    self._display = display
    self._handle: Any = None
    self._points: dict[str, list[tuple[int, float]]] = {}  # Name of the curve -> (updates, loss).
    self._next = 0.0  # The earliest time of the next drawing.

  def on_start(self, step: int, folder: epath.Path):
    for record in metric_files.records(folder):
      if record["updates"] <= step:
        self._add(record)
    # Before any line and bar, because a display begins a new block of output.
    self._handle = self._display.display(self._display.HTML(""), display_id=True)

  def on_record(self, record: dict[str, Any]):
    self._add(record)
    if time.monotonic() >= self._next:
      self._draw()

  def on_end(self, status: str):
    self._draw()

  def _add(self, record: dict[str, Any]):
    if isinstance(record.get("loss"), int | float):
      points = self._points.setdefault(record.get("set", "training"), [])
      points.append((record["updates"], record["loss"]))

  def _draw(self):
    if self._handle is None or not self._points:
      return
    began = time.monotonic()
    self._handle.update(self._display.Image(data=_png(self._points)))
    now = time.monotonic()
    self._next = now + (now - began) / _SHARE


def _png(curves: dict[str, list[tuple[int, float]]]) -> bytes:
  # Not pyplot, whose state and backend are the user's.
  from matplotlib.figure import Figure

  figure = Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
  axes = figure.add_subplot(xlabel="updates", ylabel="loss")
  for name, points in curves.items():
    marker = "" if name == "training" and len(points) > 1 else "o"
    axes.plot(*zip(*points, strict=True), label=f"{name}  {points[-1][1]:.3f}", marker=marker)
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  file = io.BytesIO()
  figure.savefig(file, format="png")
  return file.getvalue()


def callbacks() -> list[Callback]:
  """Returns the callbacks of a run in a notebook: a loss curve, if matplotlib is installed."""
  if not in_notebook():
    return []
  try:
    import matplotlib.figure  # noqa: F401 (It takes a second: not at the first drawing.)
  except ImportError:
    return []
  from IPython import display  # pyright: ignore[reportMissingImports]

  return [LossCurve(display)]
