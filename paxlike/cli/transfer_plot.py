# SPDX-License-Identifier: Apache-2.0
"""The pictures of `--mode=transfer`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paxlike.cli import figures
from paxlike.transfer.coordinate_check import Check
from paxlike.transfer.rate_table import Tables

if TYPE_CHECKING:
  from matplotlib.figure import Figure


def of_check(check: Check) -> "Figure":
  """Plots RMS over width after the last step, a panel for each parametrization."""
  figure = figures.empty()
  figure.set_size_inches(1 + 4.5 * len(check.sizes), 5)
  panels = figure.subplots(1, len(check.sizes), sharey=True, squeeze=False)[0]
  for panel, (kind, sizes) in zip(panels, check.sizes.items(), strict=True):
    slopes = sizes.slopes()
    for name, color in zip(sizes.rms, figures.colors(len(sizes.rms)), strict=True):
      label = f"{name}  {slopes[name]:+.2f}"
      panel.plot(sizes.widths, sizes.rms[name][:, -1], "o-", color=color, label=label, markersize=4)
    figures.frame(panel, f"RMS after {check.training.steps} steps" if panel is panels[0] else "")
    panel.set_yscale("log")
    _log_scale(panel, sizes.widths)
    panel.set_xlabel("MODEL_DIMS", color=figures.INK)
    panel.set_title(kind, color=figures.INK)
    panel.legend(
      title="slope", frameon=False, fontsize=8, labelcolor=figures.INK, loc="center left",
      bbox_to_anchor=(1, 0.5),
    )  # fmt: skip
  return figure


def of_rates(tables: Tables) -> "Figure":
  """Plots loss over learning rate: colours are widths, a row of panels for each depth."""
  first = next(iter(tables.tables.values()))
  depths = sorted({shape.depth for shape in first.losses})
  widths = sorted({shape.width for shape in first.losses})
  figure = figures.empty()
  figure.set_size_inches(1 + 4 * len(tables.tables), 0.5 + 2.6 * len(depths))
  panels = figure.subplots(
    len(depths), len(tables.tables), sharex=True, sharey="row", squeeze=False
  )
  for column, (kind, table) in enumerate(tables.tables.items()):
    best = table.best()
    for shape, losses in table.losses.items():
      panel = panels[depths.index(shape.depth), column]
      color = figures.colors(len(widths))[widths.index(shape.width)]
      panel.plot(table.rates, losses, "o-", color=color, label=f"{shape.width}", markersize=3)
      if np.isfinite(best[shape].rate):
        panel.axvline(best[shape].rate, color=color, linewidth=0.8, linestyle=":")
    panels[0, column].set_title(f"{kind}: best rates x {table.spread():.2f}", color=figures.INK)
    panels[-1, column].set_xlabel("LEARNING_RATE", color=figures.INK)
  for depth, row in zip(depths, panels, strict=True):
    for panel in row:
      figures.frame(panel, f"loss, NUM_LAYERS={depth}" if panel is row[0] else "")
      _log_scale(panel, first.rates)
    _limit(row[0], [table.losses[s] for table in tables.tables.values() for s in table.losses
                    if s.depth == depth])  # fmt: skip
  panels[0, -1].legend(
    title="MODEL_DIMS", frameon=False, labelcolor=figures.INK, loc="upper left",
    bbox_to_anchor=(1, 1),
  )  # fmt: skip
  return figure


def _log_scale(panel: Any, ticks: Sequence[float]):
  """Makes the horizontal axis logarithmic, with these ticks alone."""
  import matplotlib.ticker

  panel.set(xscale="log", xticks=ticks)
  panel.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
  panel.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())


def _limit(panel: Any, losses: list[np.ndarray]):
  """Leaves out losses that are much above the others', which would flatten their curves."""
  found = np.concatenate(losses)
  least = np.nanmin(found) if np.isfinite(found).any() else 0.0
  middle = np.nanmedian(found) if np.isfinite(found).any() else 1.0
  panel.set_ylim(least - 0.05 * (middle - least), middle + 1.5 * (middle - least) + 1e-6)
