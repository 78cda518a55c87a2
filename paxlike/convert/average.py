# SPDX-License-Identifier: Apache-2.0
"""Averages the weights of a run's checkpoints: `paxlike-average RUN --to=DIR`."""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from etils import epath

from paxlike import file_io, run_folder
from paxlike.convert import main as convert
from paxlike.convert import new_folder
from paxlike.errors import UserError
from paxlike.telemetry import console

_HELP = """\
Writes the mean of the trained weights of several checkpoints of a run (LAWA, Kaddour, 2022,
arXiv:2209.14981) as a folder that `paxlike --mode=eval --job_log_dir=DIR`, --mode=decode,
paxlike-convert and --fdl.CHECKPOINT_RESTORE_PATH=DIR take. All checkpoints count the same, and the
mean is in float32. Non-trainable state, such as scales of FP8, is that of the last checkpoint. One
array at a time is in memory.
"""
# What evaluation and decoding read in the folder of a run, besides checkpoints.
_COPIED = (
  "config.json",
  "config.txt",
  "experiment.json",
  "restored_from.json",
  "tokenizer",
  "code",
)
RECORD = "averaged_from.json"


def main() -> int:
  """Entry point of the `paxlike-average` command. Returns the exit status."""
  convert.set_up()
  status = run(sys.argv[1:])
  if status > 128:
    os._exit(status)  # Threads of an interrupted write may still run.
  return status


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, or 2 for a user error."""
  return console.exit_status("paxlike-average", lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
  parser = console.Parser(prog="paxlike-average", description=_HELP)
  parser.add_argument("run", metavar="RUN", type=console.path, help="the folder of the run")
  which = parser.add_mutually_exclusive_group()
  which.add_argument(
    "--last", type=int, metavar="N", help="the newest N checkpoints (default: all that there are)"
  )
  which.add_argument("--steps", type=_steps, metavar="A,B", help="the checkpoints of these steps")
  parser.add_argument(
    "--to",
    type=console.path,
    required=True,
    metavar="DIR",
    help="the folder to write, new or empty",
  )
  options = parser.parse_args(argv)
  to = pathlib.Path(options.to)
  new_folder.check_new(to, flag="to")
  run_folder.check_name(to, flag="to")
  average = Average(options.run, steps=options.steps, last=options.last)
  average.write(to)
  print(f"{to}: the mean of checkpoints {', '.join(map(str, average.steps))} of {options.run}")
  return 0


def _steps(text: str) -> list[int]:
  try:
    return sorted({int(step) for step in text.split(",")})
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r}: expected steps such as 100,200") from None


class Average:
  """The mean of the trained weights of several checkpoints of a run.

  Attributes:
    steps: Their steps, in order.
  """

  def __init__(self, path: str, *, steps: Sequence[int] | None, last: int | None):
    """Finds and compares the checkpoints; reads no array.

    Args:
      path: The folder of the run.
      steps: The checkpoints' steps; None: see `last`.
      last: The number of the newest checkpoints; None: all.

    Raises:
      UserError: It is no run, fewer than two checkpoints are chosen, or their weights differ in
        names or shapes.
    """
    # Imported after the flags have been checked, because it takes time.
    from paxlike.checkpoints import layout_conversion
    from paxlike.checkpoints.run_checkpoints import Checkpoints

    self._folder = file_io.absolute(path)
    with run_folder.reading(self._folder):
      if not (self._folder / "config.json").exists():
        raise UserError(f"{path} is not the folder of a run: it has no config.json.")
    saved = Checkpoints(self._folder / "checkpoints", keep=None)
    self.steps = _chosen(saved.steps(), steps, last, path)
    self._checkpoints = [saved.at(saved.find(step)) for step in self.steps]
    self._layout = self._checkpoints[-1].layout()
    self._arrays = {
      name: spec
      for name, spec in self._checkpoints[-1].arrays().items()
      if name.startswith(("params.", "extra."))
    }
    weights = {name: spec for name, spec in self._arrays.items() if name.startswith("params.")}
    for checkpoint in self._checkpoints[:-1]:
      checkpoint.check(weights, layout=self._layout, unread=layout_conversion.all_but_weights)

  def write(self, to: pathlib.Path):
    """Writes the folder `to`, which must be missing or empty.

    Raises:
      UserError: A checkpoint is damaged, or the folder cannot be written.
    """
    from paxlike.convert import streaming

    with new_folder.filling(to, flag="to") as folder:
      where = folder / "checkpoints"
      streaming.write(where, self._means(), layout=self._layout, step=self.steps[-1])
      with run_folder.reading(self._folder):
        for name in _COPIED:
          _copy(self._folder / name, epath.Path(folder) / name)
      record = {"path": os.fspath(self._folder), "steps": self.steps}
      (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")

  def _means(self) -> Iterator[tuple[str, np.ndarray]]:
    for name, spec in self._arrays.items():
      if not name.startswith("params."):
        yield name, self._checkpoints[-1].read(name)
        continue
      mean = np.zeros(spec.shape, np.float32)
      for checkpoint in self._checkpoints:
        mean += checkpoint.read_as(name, self._layout)
      mean /= len(self._checkpoints)
      yield name, mean


def _copy(source: epath.Path, to: epath.Path):
  """Copies a file or a folder, if it is there."""
  if source.is_dir():
    to.mkdir()
    for inner in source.iterdir():
      _copy(inner, to / inner.name)
  elif source.exists():
    to.write_bytes(file_io.read_bytes(source))


def _chosen(
  there: Sequence[int], steps: Sequence[int] | None, last: int | None, path: str
) -> list[int]:
  """Returns the steps of the checkpoints to average, of those that are there."""
  known = ", ".join(map(str, there)) or "none"
  if last is not None and last < 2:
    raise UserError(f"--last={last}: an average needs at least 2 checkpoints.")
  if steps is not None and (missing := sorted(set(steps) - set(there))):
    raise UserError(f"--steps={missing[0]}: {path} has no such checkpoint; available: {known}.")
  chosen = list(there if steps is None else steps)
  if len(chosen) < max(2, last or 0):
    number = last or "at least 2"
    found = ", ".join(map(str, chosen)) or "none"
    raise UserError(f"{path}: an average needs {number} checkpoints; there: {found}.")
  return chosen if last is None else chosen[-last:]


if __name__ == "__main__":
  sys.exit(main())
