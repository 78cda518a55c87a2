# SPDX-License-Identifier: Apache-2.0
"""The output of `--mode=check`."""

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from paxlike import checks
from paxlike.checks import Check
from paxlike.telemetry import formatting


def show(found: Iterable[Check], *, as_json: bool) -> int:
  """Prints checks as they finish, in process 0; returns the exit status.

  In all processes it is 1 if a check failed in any of them.
  """
  began, results = time.perf_counter(), []
  prints = jax.process_index() == 0
  for item, group in itertools.groupby(found, key=lambda check: check.item):
    of_item = list(group)
    results += of_item
    if prints and not as_json:
      print(section(item, of_item), end="\n\n", flush=True)
  failed = [check.verdict == checks.FAIL for check in results]
  by_process = np.array([sum(failed)])
  if jax.process_count() > 1:
    by_process = multihost_utils.process_allgather(np.array(sum(failed))).reshape(-1)
  seconds = time.perf_counter() - began
  if prints and as_json:
    print(json.dumps(facts(results, by_process.tolist(), seconds)))
  elif prints:
    print(summary(results, by_process.tolist(), seconds))
  return 1 if by_process.any() else 0


def section(item: str, results: Iterable[Check]) -> str:
  """Returns the checks of one item as a table under its name."""
  rows = [(check.verdict, check.name, _figures(check), check.detail) for check in results]
  return f"{item}\n" + formatting.table(
    ("", "", "", ""), [("  " + row[0], *row[1:]) for row in rows]
  )


def summary(results: Sequence[Check], failed_by_process: Sequence[int], seconds: float) -> str:
  """Returns the last lines: which checks failed, and the count of each verdict."""
  counts = Counter(check.verdict for check in results)
  order = (checks.PASS, checks.FAIL, checks.REFUSED, checks.ABSENT)
  verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
  lines = [f"FAIL  {check.item}: {check.name}" for check in results if check.verdict == checks.FAIL]
  lines += [
    f"FAIL  process {process}: {count} checks"
    for process, count in enumerate(failed_by_process)
    if process > 0 and count
  ]
  lines.append(f"{'FAIL' if any(failed_by_process) else 'pass'}: {verdicts} in {seconds:.0f} s")
  return "\n".join(lines)


def facts(
  results: Sequence[Check], failed_by_process: Sequence[int], seconds: float
) -> dict[str, Any]:
  """Returns the results for JSON; figures that are not finite become null."""

  def finite(figures: Any) -> dict[str, float | None]:
    return {name: float(x) if np.isfinite(x) else None for name, x in figures.items()}

  return {
    "passed": not any(failed_by_process),
    "failed_by_process": list(failed_by_process),
    "seconds": seconds,
    "checks": [
      {
        "item": check.item,
        "name": check.name,
        "verdict": check.verdict,
        "figures": finite(check.figures),
        "detail": check.detail,
      }
      for check in results
    ],
  }


def _figures(check: Check) -> str:
  return ", ".join(_written(check.figures))


def _written(figures: Any) -> Iterator[str]:
  for name, number in figures.items():
    yield f"{number:.3g} {name}" if "/" in name else f"{name} {number:.2g}"
