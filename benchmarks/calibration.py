# SPDX-License-Identifier: Apache-2.0
"""Predicts published step times by `paxlike.planning.cost_model`, and prints the errors.

  python benchmarks/calibration.py                   # by the constants of paxlike, fitted to all
  python benchmarks/calibration.py --held_out        # each source by constants fitted without it
  python benchmarks/calibration.py --fit             # prints constants fitted to these rows
  python benchmarks/calibration.py --rows=FILE       # of rows in the format of published_steps.json

The constants of `kernel_rates.Fitted` are fitted together, to all rows. Rows that differ in the
number of devices only count as one. `KNOWN` has the value that is expected of each constant and a
range: a constant that few rows depend on stays there. The fit is least squares of
log(predicted / published), with outliers counted less; the errors that are printed are those of
predicted / published. Sources that are held out are refitted by three Gauss-Newton steps with the
Jacobian of the fit to all rows.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import published
from published import Row

from paxlike.devices.kernel_rates import FITTED, Fitted
from paxlike.planning import cost_model, machines
from paxlike.planning.machines import Machine
from paxlike.planning.software import Software
from paxlike.planning.times import Times
from paxlike.telemetry import formatting

# Constant -> (the expected value, the factor by which it may be off: 1.1 is 10 %).
#
# All are guesses, made when fits had been seen. Those of attention lie within what the papers on
# FlashAttention-2 (Dao, 2023) and -3 (Shah et al., 2024) report of A100 and H100.
KNOWN: dict[str, tuple[float, float]] = {
  "a100": (0.80, 1.25),
  "h100": (0.72, 1.25),
  "h100_2023": (0.65, 1.25),
  "blackwell": (0.65, 1.25),
  "v5e": (0.80, 1.15),
  "v5p": (0.78, 1.15),
  "v6e": (0.70, 1.15),
  "v7x": (0.60, 1.25),
  "fp8_gpu": (0.90, 1.10),
  "fp8_tpu": (0.90, 1.10),
  "grouped": (0.85, 1.10),
  "depth": (64.0, 1.6),
  "part_wave": (0.30, 1.6),
  "flash1_a100": (0.47, 1.10),
  "flash1_h100": (0.29, 1.15),
  "flash2_a100": (0.62, 1.10),
  "flash2_h100": (0.36, 1.10),
  "cudnn_a100": (0.60, 1.10),
  "cudnn_h100": (0.58, 1.10),
  "cudnn_blackwell": (0.50, 1.10),
  "splash": (0.50, 1.15),
  "flash1_backward": (0.60, 1.10),
  "backward": (0.75, 1.15),
  "flash1_narrow": (0.97, 1.05),
  "narrow": (0.65, 1.10),
  "length": (650.0, 1.25),
  "bandwidth": (0.78, 1.10),
  "bandwidth_tpu": (0.85, 1.10),
  "fast": (0.70, 1.15),
  "slow": (0.85, 1.15),
  "fast_tpu": (0.85, 1.15),
  "slow_tpu": (0.70, 1.25),
  "contention": (0.25, 1.6),
  "unhidden": (0.25, 1.8),
  "jitter": (0.006, 1.6),
  "power": (0.60, 1.35),
  "permuted": (1.5, 1.4),
  "border": (256.0, 1.5),
}
_ERROR = 0.05  # What is expected of a row.
_OUTLIER = 0.10  # Errors beyond this count less.


@dataclasses.dataclass(frozen=True)
class Result:
  """A row with its prediction in seconds, by cause."""

  row: Row
  times: Times

  @property
  def error(self) -> float:
    """Of the prediction, as a fraction of what was published."""
    return self.times.total / self.row.published - 1


@functools.cache
def _machine(chip: str, software: Software, fitted: Fitted) -> Machine:
  machine = machines.find(chip, software=software, fitted=fitted)
  assert machine is not None, chip
  return machine


def result(row: Row, fitted: Fitted = FITTED) -> Result:
  """Predicts a row."""
  machine = _machine(row.chip, row.software, fitted)
  return Result(row, cost_model.of(row.model, row.configuration, machine))


class Fit:
  """The constants that fit rows best."""

  def __init__(self, rows: Sequence[Row], *, rounds: int = 8):
    """Fits to all `rows` by Gauss-Newton steps."""
    self._rows = rows
    count = collections.Counter(row.key for row in rows)
    self._weights = np.array([count[row.key] ** -0.5 for row in rows])
    self._known = np.log([value for value, _ in KNOWN.values()])
    self._spread = np.log([factor for _, factor in KNOWN.values()])
    x = self._known
    everything = np.ones(len(rows), bool)
    for _ in range(rounds):
      self._jacobian, errors = self._derivatives(x)
      x = x + self._step(x, errors, everything)
    self._x = x

  @property
  def fitted(self) -> Fitted:
    """The constants."""
    return _constants(self._x)

  def without(self, source: str) -> Fitted:
    """Returns the constants that are fitted to the rows of all other sources."""
    kept = np.array([row.source != source for row in self._rows])
    others = [row for row in self._rows if row.source != source]
    errors, x = np.zeros(len(self._rows)), self._x
    for _ in range(3):
      errors[kept] = _errors(others, x)
      x = x + self._step(x, errors, kept)
    return _constants(x)

  def _derivatives(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (d log(predicted) / d log(constant), log(predicted / published))."""
    errors, columns, small = _errors(self._rows, x), [], 1e-3
    for place in range(len(x)):
      moved = x.copy()
      moved[place] += small
      columns.append((_errors(self._rows, moved) - errors) / small)
    return np.stack(columns, 1), errors

  def _step(self, x: np.ndarray, errors: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the change of the logarithms of the constants."""
    weights = self._weights * kept / np.sqrt(1 + (errors / _OUTLIER) ** 2) / _ERROR
    left = np.concatenate([self._jacobian * weights[:, None], np.diag(1 / self._spread)])
    right = np.concatenate([-errors * weights, (self._known - x) / self._spread])
    step, *_ = np.linalg.lstsq(left, right, rcond=None)
    return np.clip(step, -0.5, 0.5)


def _errors(rows: Iterable[Row], x: np.ndarray) -> np.ndarray:
  fitted = _constants(x)
  return np.array([math.log(1 + result(row, fitted).error) for row in rows])


def _constants(x: np.ndarray) -> Fitted:
  return Fitted(**dict(zip(KNOWN, np.exp(x).tolist(), strict=True)))


def held_out(rows: Sequence[Row]) -> list[Result]:
  """Predicts the rows of each source by constants that are fitted to the others."""
  fit = Fit(rows)
  constants = {source: fit.without(source) for source in {row.source for row in rows}}
  return [result(row, constants[row.source]) for row in rows]


def main():
  parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
  parser.add_argument("--rows", default=published.FILE, help="a file of rows")
  parser.add_argument("--held_out", action="store_true", help="hold out each source in turn")
  parser.add_argument("--fit", action="store_true", help="fit the constants, and print them")
  parser.add_argument("--json", action="store_true", help="print one JSON object")
  arguments = parser.parse_args()
  rows = published.load(arguments.rows)
  if arguments.held_out:
    results = held_out(rows)
  else:
    fitted = Fit(rows).fitted if arguments.fit else FITTED
    if arguments.fit:
      for name, value in dataclasses.asdict(fitted).items():
        print(f"{name}: {value:.4g}", file=sys.stderr)
    results = [result(row, fitted) for row in rows]
  print(json.dumps([_facts(one) for one in results]) if arguments.json else page(results))


def _facts(one: Result) -> dict[str, Any]:
  return {
    "source": one.row.source,
    "row": one.row.name,
    "chip": one.row.chip,
    "predicted_seconds": one.times.total,
    "published_seconds": one.row.published,
    "error": one.error,
    "parts": one.times.parts,
  }


def page(results: Sequence[Result]) -> str:
  """Returns a line for each result, and their errors by source and by group."""
  header = ("row", "predicted s", "published s", "error", "most of it")
  lines = [
    (
      one.row.name,
      f"{one.times.total:.3f}",
      f"{one.row.published:.3f}",
      f"{100 * one.error:+.1f} %",
      one.times.bound,
    )
    for one in results
  ]
  configurations = len({one.row.key for one in results})
  return "\n\n".join(
    [
      formatting.table(header, lines, right=(1, 2, 3)),
      _summary("source", results, lambda row: [row.source]),
      _summary("group", results, lambda row: [*row.groups, "all"]),
      f"{len(KNOWN)} fitted constants, {len(results)} rows of {configurations} configurations",
    ]
  )


def _summary(title: str, results: Sequence[Result], names: Callable[[Row], list[str]]) -> str:
  """Returns the errors of groups of rows; means and medians count a configuration once."""
  groups: dict[str, list[Result]] = {}
  for one in results:
    for name in names(one.row):
      groups.setdefault(name, []).append(one)
  lines = []
  for name, found in sorted(groups.items(), key=lambda item: item[0] == "all"):
    of_key: dict[Any, list[float]] = {}
    for one in found:
      of_key.setdefault(one.row.key, []).append(one.error)
    signed = [statistics.mean(errors) for errors in of_key.values()]
    errors = [statistics.mean(map(abs, errors)) for errors in of_key.values()]
    worst = max((one.error for one in found), key=abs)
    by_row = statistics.mean(abs(one.error) for one in found)
    numbers = (statistics.mean(errors), statistics.median(errors), by_row)
    cells = [f"{100 * number:.1f} %" for number in numbers]
    cells += [f"{100 * number:+.1f} %" for number in (statistics.mean(signed), worst)]
    lines.append((name, str(len(found)), str(len(of_key)), *cells))
  header = (title, "rows", "configurations", "mean", "median", "mean by row", "signed", "worst")
  return formatting.table(header, lines, right=range(1, 8))


if __name__ == "__main__":
  main()
