# SPDX-License-Identifier: Apache-2.0
"""Starts two runs in one folder at nearly the same moment, again and again.

    PYTHONPATH=tests python -m helpers.two_runs [--times=50] [--seed=0]

One must train, the other say who does and end with status 2; what was there must still be there.
Ends with status 1 if anything is lost, or if two trained.
"""

import argparse
import pathlib
import random
import re
import sys
import tempfile
import time

from helpers.program import TINY, curve, finish, start
from paxlike.checkpoints.run_checkpoints import Checkpoints

_REFUSED = re.compile(r"paxlike: --job_log_dir=\S+ is in use: process \d+ on \S+ writes there\..*")


def steps_of(folder: pathlib.Path) -> list[int]:
  """Returns the steps of the checkpoints that are there and whole."""
  saved = Checkpoints(folder / "checkpoints", keep=None)
  return [step for step in saved.steps() if saved.at(step).verify()]


def start_two(folder: pathlib.Path, *, delay: float, steps: int) -> list[str]:
  """Starts two runs that go on to `steps`; returns what went wrong."""
  flags = (*TINY, f"--job_log_dir={folder}", f"--fdl.MAX_STEPS={steps}")
  flags += ("--fdl.CHECKPOINT_EVERY_N_STEPS=5", "--fdl.CHECKPOINT_MAX_TO_KEEP=none")
  before = steps_of(folder)
  first = start(*flags)
  time.sleep(delay)
  second = start(*flags)
  results = [finish(process) for process in (first, second)]
  wrong = []
  statuses = [status for status, *_ in results]
  # One that came when the other had ended finds nothing to do.
  if not set(statuses) <= {0, 2} or 0 not in statuses:
    wrong.append(f"statuses {statuses}: {[err for *_, err in results]}")
  for status, _, err in results:
    if status == 2 and not _REFUSED.fullmatch(err.strip()):
      wrong.append(f"refused with {err!r}")
  after = steps_of(folder)
  if lost := {*before, *range(5, steps + 1, 5)} - set(after):
    wrong.append(f"checkpoints {sorted(lost)} are lost: there is {after}")
  if damaged := list(folder.glob("checkpoints/damaged_*")):
    wrong.append(f"renamed: {[path.name for path in damaged]}")
  if [updates for updates, _ in curve(folder)] != list(range(1, steps + 1)):
    wrong.append("metrics.jsonl lacks steps, or has them twice")
  print(f"statuses {statuses}, {len(after)} checkpoints {'; '.join(wrong)}", flush=True)
  return wrong


def two_runs(folder: pathlib.Path, *, times: int, seed: int) -> list[str]:
  """Returns what went wrong."""
  rng, wrong = random.Random(seed), []
  for number in range(times):
    # A new folder each fifth time; in the others, runs that go on.
    place = folder / str(number // 5)
    wrong += start_two(place, delay=rng.uniform(0, 2) ** 2 / 4, steps=20 * (number % 5 + 1))
  return wrong


def main() -> int:
  """Does it in a temporary folder."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--times", type=int, default=50)
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    wrong = two_runs(pathlib.Path(folder), times=options.times, seed=options.seed)
  print("\n".join(wrong) or f"{options.times} times two runs in one folder: nothing is lost")
  return bool(wrong)


if __name__ == "__main__":
  sys.exit(main())
