# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=transfer`."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from paxlike.telemetry import formatting
from paxlike.transfer.coordinate_check import Check, Sizes
from paxlike.transfer.rate_table import Table, Tables, averaged
from paxlike.transfer.shapes import Training


def of_check(check: Check) -> str:
  """Returns the coordinate check as text."""
  (first, *_), widths = check.sizes.values(), next(iter(check.sizes.values())).widths
  header = ("activation", "parametrization", "slope", *map(str, widths))
  slopes = {kind: sizes.slopes() for kind, sizes in check.sizes.items()}
  rows = [
    (name, kind, f"{slopes[kind][name]:+.3f}", *map(_number, sizes.rms[name][:, -1]))
    for name in first.rms
    for kind, sizes in check.sizes.items()
  ]
  rows += [
    ("loss", kind, "", *(f"{loss:.3f}" for loss in sizes.losses[:, -1]))
    for kind, sizes in check.sizes.items()
  ]
  about = (
    f"RMS of activations by MODEL_DIMS after {_of(check.training)} at"
    f" LEARNING_RATE={check.rate:g}, and the slope of log(RMS) over log(MODEL_DIMS)"
  )
  table = formatting.table(header, rows, right=range(2, len(header)))
  steepest = "\n".join(_steepest(kind, found) for kind, found in slopes.items())
  return f"{about}\n\n{table}\n\n{steepest}"


def _steepest(kind: str, slopes: dict[str, float]) -> str:
  name = max(slopes, key=lambda name: abs(slopes[name]) if slopes[name] == slopes[name] else 1e9)
  return f"{kind}: the steepest slope is {slopes[name]:+.3f}, of {name}"


def facts_of_check(check: Check) -> dict[str, Any]:
  """Returns the coordinate check as plain data."""
  return {
    **check.training._asdict(),
    "learning_rate": check.rate,
    "parametrizations": {kind: _plain(sizes) for kind, sizes in check.sizes.items()},
  }


def _plain(sizes: Sizes) -> dict[str, Any]:
  return {
    "widths": list(sizes.widths),
    "slopes": {name: _finite(slope) for name, slope in sizes.slopes().items()},
    "rms_before_and_after_each_step": {
      name: _finite(rms.tolist()) for name, rms in sizes.rms.items()
    },
    "losses": _finite(sizes.losses.tolist()),
  }


def of_rates(tables: Tables) -> str:
  """Returns the losses and the best rates as text."""
  last = averaged(tables.training.steps)
  drawn = f", over {tables.draws} initial weights each" if tables.draws > 1 else ""
  about = (
    f"training loss, a mean of the last {last} of {_of(tables.training)}{drawn}, by LEARNING_RATE,"
    " and the best one"
  )
  return "\n\n".join([about, *(_of_table(kind, one) for kind, one in tables.tables.items())])


def _of_table(kind: str, table: Table) -> str:
  header = ("MODEL_DIMS", "NUM_LAYERS", *(f"{rate:g}" for rate in table.rates), "best")
  best = table.best()
  rows = [
    (
      str(shape.width),
      str(shape.depth),
      *(f"{loss:.3f}" if np.isfinite(loss) else "-" for loss in losses),
      f"{best[shape].at_edge}{best[shape].rate:.3g}",
    )
    for shape, losses in table.losses.items()
  ]
  at_least = "at least " if any(one.at_edge for one in best.values()) else ""
  return (
    f"{kind}\n{formatting.table(header, rows, right=range(len(header)))}\n"
    f"best rates differ by a factor of {at_least}{table.spread():.2f}"
  )


def facts_of_rates(tables: Tables) -> dict[str, Any]:
  """Returns the losses and the best rates as plain data."""
  return {
    **tables.training._asdict(),
    "draws": tables.draws,
    "parametrizations": {
      kind: {
        "rates": list(table.rates),
        "factor_between_best_rates": _finite(table.spread()),
        "models": list(_models(table)),
      }
      for kind, table in tables.tables.items()
    },
  }


def _models(table: Table) -> Iterator[dict[str, Any]]:
  best = table.best()
  for shape, losses in table.losses.items():
    found = {"best_rate": _finite(best[shape].rate), "at_edge": bool(best[shape].at_edge)}
    yield {**shape._asdict(), "losses": _finite(losses.tolist()), **found}


def _of(training: Training) -> str:
  return f"{training.steps} steps of {training.tokens_per_step:,} tokens of {training.experiment}"


def _number(value: float) -> str:
  return f"{value:.4g}"


def _finite(value: Any) -> Any:
  """Returns nested lists of floats with None for what JSON cannot hold."""
  if isinstance(value, list):
    return [_finite(one) for one in value]
  return value if math.isfinite(value) else None
