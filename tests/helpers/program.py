# SPDX-License-Identifier: Apache-2.0
"""Running the program on a model so small that nothing but compilation takes time."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

from helpers import warm_python
from helpers.sources import REPOSITORY
from paxlike.main import main

TINY = (
  "--fdl_config=Gpt3_52k",
  "--fdl.VOCAB_SIZE=64",
  "--fdl.MAX_SEQ_LEN=16",
  "--fdl.SUMMARY_INTERVAL_STEPS=1",
  "--fdl.LR_COS_WARMUP=2",
  "--fdl.LEARNING_RATE=1e-2",
  "--fdl.FPROP_DTYPE=float32",
)

# The same on a text, of 257 byte symbols.
TEXT = (
  "--fdl_config=Text126M",
  *(flag for flag in TINY if "fdl_config" not in flag and "VOCAB" not in flag),
  "--fdl.VOCAB_SIZE=257",
  "--fdl.NUM_LAYERS=2",
  "--fdl.MODEL_DIMS=16",
  "--fdl.HIDDEN_DIMS=32",
  "--fdl.NUM_HEADS=2",
  "--fdl.DIMS_PER_HEAD=8",
  "--fdl.PERCORE_BATCH_SIZE=1",
)


def run(*flags: str) -> int:
  """Runs the program in this process, on its eight devices; returns the exit status."""
  return main(["paxlike", *flags])


def start(
  *flags: str,
  cwd: pathlib.Path | None = None,
  file_blocks: int | None = None,
  fault: pathlib.Path | None = None,
  log: pathlib.Path | None = None,
  redirected: str = "",
  signalled: bool = False,
) -> subprocess.Popen:
  """Starts the program in a process of its own, on one device.

  `signalled` says that the test sends signals, which the returned process must receive itself.
  `file_blocks` is the size that no file may exceed, in blocks of the shell's `ulimit -f`; `fault`
  is a file that says where it gets stuck (faulty.py); `log` takes what it prints; `redirected` is
  bash for other streams.
  """
  limit = "" if file_blocks is None else f"ulimit -f {file_blocks}; "
  script = str(pathlib.Path(__file__).parent / "faulty.py")
  what = ["-m", "paxlike.main"] if fault is None else [script, str(fault)]
  cold = signalled or bool(fault or file_blocks or redirected)
  command = [sys.executable if cold else str(warm_python.program()), *what, *flags]
  with contextlib.ExitStack() as stack:
    out = subprocess.PIPE if log is None else stack.enter_context(log.open("w"))
    return subprocess.Popen(
      ["bash", "-c", f'{limit}exec "$@" {redirected}', "paxlike", *command],
      cwd=cwd,
      stdout=out,
      stderr=out if log is None else subprocess.STDOUT,
      text=True,
      env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"},
    )


def finish(process: subprocess.Popen, *, timeout: float = 300) -> tuple[int, str, str]:
  """Waits for a process; returns its status, output and errors."""
  out, err = process.communicate(timeout=timeout)
  return process.returncode, out, err


def curve(folder: pathlib.Path, kind: str = "train") -> list[tuple[int, float]]:
  """Returns (updates, loss) of every record of a run."""
  return [(one["updates"], one["loss"]) for one in records(folder, kind)]


def records(folder: pathlib.Path, kind: str = "train") -> list[dict]:
  """Returns the records of a kind in the metrics of a run."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [record for record in map(json.loads, lines) if record["kind"] == kind]
