# SPDX-License-Identifier: Apache-2.0
"""Kills a run at random moments, resumes it each time, and compares it with one left alone.

    PYTHONPATH=tests python -m helpers.kill_and_resume [--kills=20] [--seed=0] [--fdl.KNOB=VALUE...]
        [--fdl_config=EXPERIMENT]

The run has these knobs, and saves a checkpoint every 5 steps. Ends with status 1 if a restart does
not resume from the newest checkpoint, or if the loss of any step differs in any bit. Prints the
goodput.
"""

import argparse
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from etils import epath

from helpers.program import TINY, curve, finish, start
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.telemetry import goodput


def kill_and_resume(
  folder: pathlib.Path, *, kills: int, seed: int, knobs: Sequence[str] = ()
) -> list[str]:
  """Returns what went wrong."""
  # Long enough not to end between two kills.
  is_tiny = not any(knob.startswith("--fdl_config") for knob in knobs)
  flags = (*TINY, f"--fdl.MAX_STEPS={200 + 40 * kills}") if is_tiny else ()
  flags += ("--fdl.CHECKPOINT_EVERY_N_STEPS=5", "--fdl.CHECKPOINT_MAX_TO_KEEP=3", *knobs)
  alone = start(*flags, f"--job_log_dir={folder / 'alone'}", "--enable_checkpoint_saving=false")
  status, _, err = finish(alone, timeout=3600)
  if status:
    return [f"the run left alone failed: {err}"]
  rng = random.Random(seed)
  wrong, killed = [], 0
  for attempt in range(kills * 10):
    newest = Checkpoints(folder / "killed" / "checkpoints", keep=None).latest()
    process = start(*flags, f"--job_log_dir={folder / 'killed'}", signalled=True)
    if killed < kills:
      # Half of the kills come at a moment of the start, the others soon after the first steps.
      if rng.random() < 0.5:
        wait_for_steps(folder / "killed", newest or 0, process)
      time.sleep(rng.uniform(0.0, 4.0))
      process.kill()
    status, out, err = finish(process)
    killed += status == -9
    resumed = f"resuming from checkpoint {newest}" in out
    print(f"attempt {attempt}: status {status}, {killed} killed, newest before: {newest}")
    if status not in (0, -9):
      return [*wrong, f"attempt {attempt} failed: {err}"]
    if newest is not None and out and not resumed:
      wrong.append(f"attempt {attempt} did not resume from checkpoint {newest}: {out[:200]}")
    if status == 0:
      if killed >= kills:
        break
      # It was too quick for us: once more from the start.
      (folder / "killed").rename(folder / f"done{attempt}")
  if (spent := goodput.summary(epath.Path(folder / "killed"))) is not None:
    print(spent.text())
  if curve(folder / "killed") != curve(folder / "alone"):
    wrong.append("the loss curves differ")
  return wrong


def wait_for_steps(folder: pathlib.Path, newest: int, process: subprocess.Popen):
  """Returns when a checkpoint newer than `newest` is there, or the process has ended."""
  while (
    process.poll() is None
    and (Checkpoints(folder / "checkpoints", keep=None).latest() or 0) <= newest
  ):
    time.sleep(0.05)


def main() -> int:
  """Runs the comparison in a temporary folder."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  options, knobs = parser.parse_known_args()
  with tempfile.TemporaryDirectory() as folder:
    wrong = kill_and_resume(
      pathlib.Path(folder), kills=options.kills, seed=options.seed, knobs=knobs
    )
  print("\n".join(wrong) or f"{options.kills} kills: every loss of every step is the same")
  return bool(wrong)


if __name__ == "__main__":
  sys.exit(main())
