# SPDX-License-Identifier: Apache-2.0
"""Verifies the checkpoints of runs: `paxlike-verify DIR...`."""

import argparse
import sys
from collections.abc import Sequence

from paxlike import run_folder, tables
from paxlike.errors import UserError, one_line

_HELP = """\
Verifies every checkpoint in DIR, the folder of a run or of its checkpoints, or the one checkpoint
that DIR is: every file against the checksum that was made when it was written. Prints a line for
each. Exits with 0 if all are whole, 1 if one is damaged, 2 if there is none.
"""


def main() -> int:
  """Entry point of the `paxlike-verify` command. Returns the exit status."""
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line. Returns the exit status."""
  parser = argparse.ArgumentParser(prog="paxlike-verify", description=_HELP)
  parser.add_argument("folders", nargs="+", metavar="DIR")
  options = parser.parse_args(argv)
  try:
    return max([_verify(path) for path in options.folders])
  except UserError as error:
    print(f"paxlike-verify: {one_line(error)}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130


def _verify(path: str) -> int:
  """Verifies the checkpoints in a folder. Returns 1 if one is damaged, else 0."""
  # Here, after the flags have been found good; without devices, which only take time.
  from paxlike.checkpoint import Checkpoints

  folder = run_folder.absolute(path)
  wanted = folder.name.removeprefix("checkpoint_")
  step = int(wanted) if wanted != folder.name and wanted.isdigit() else None
  directory = folder.parent if step is not None else folder
  if step is None and (folder / "checkpoints").exists():
    directory = folder / "checkpoints"
  saved = Checkpoints(directory, keep=None)
  steps = [saved.find(step)] if step is not None else saved.steps()
  if not steps:
    saved.find(None)  # Raises, and says so.
  damaged = 0
  for one in steps:
    try:
      size = saved.verify(one)
    except UserError as error:
      print(one_line(error))
      damaged = 1
      continue
    found = "was written without checksums" if size is None else f"is whole, {tables.nbytes(size)}"
    print(f"{saved.path(one)} {found}")
  return damaged


if __name__ == "__main__":
  sys.exit(main())
