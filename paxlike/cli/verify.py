# SPDX-License-Identifier: Apache-2.0
"""Verifies the checkpoints of runs: `paxlike-verify DIR...`."""

import sys
from collections.abc import Sequence

from paxlike import file_io
from paxlike.errors import UserError, one_line
from paxlike.telemetry import console, formatting

_HELP = """\
Verifies every file of checkpoints against the checksum that was computed when it was written. A DIR
is the folder of a run, the folder of its checkpoints, or one checkpoint. Prints a line for each
checkpoint. One without checksums, written by an earlier version, cannot be verified and counts as
intact; one that its run removes in the meantime is skipped. All DIRs are verified. Exits with 1 if
a checkpoint is damaged, else with 2 if a DIR has no checkpoint or cannot be read, else with 0.
"""


def main() -> int:
  """Entry point of the `paxlike-verify` command. Returns the exit status."""
  console.outlive_readers()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status."""
  parser = console.Parser(prog="paxlike-verify", description=_HELP)
  parser.add_argument("folders", nargs="+", metavar="DIR", type=console.path)
  try:
    folders = parser.parse_args(argv).folders
  except UserError as error:
    return _refused(error)
  statuses = {0}
  try:
    for path in folders:
      try:
        statuses.add(_verify(path))
      except UserError as error:
        statuses.add(_refused(error))
  except KeyboardInterrupt:
    return 130
  return 1 if 1 in statuses else max(statuses)


def _refused(error: UserError) -> int:
  print(f"paxlike-verify: {one_line(error)}", file=sys.stderr)
  return 2


def _verify(path: str) -> int:
  """Verifies the checkpoints in a folder; returns 1 if one is damaged, else 0.

  Raises:
    UserError: There is none, or the folder cannot be read.
  """
  # Imported after the flags have been checked, because it takes time.
  from paxlike.checkpoints import orbax_hooks
  from paxlike.checkpoints.run_checkpoints import Checkpoints

  folder = file_io.absolute(path)
  step = orbax_hooks.step_of(folder.name)
  directory = folder.parent if step is not None else folder
  if step is None and (folder / "checkpoints").exists():
    directory = folder / "checkpoints"
  saved = Checkpoints(directory, keep=None)
  steps = [saved.find(step)] if step is not None else saved.steps()
  if not steps:
    saved.find(None)  # Raises a UserError.
  damaged = 0
  for one in steps:
    try:
      size = saved.at(one).verify()
    except UserError as error:
      if one not in saved.steps():
        print(f"{saved.path(one)} was removed meanwhile")
        continue
      print(one_line(error))
      damaged = 1
      continue
    found = (
      "was written without checksums" if size is None else f"is intact, {formatting.nbytes(size)}"
    )
    print(f"{saved.path(one)} {found}")
  return damaged


if __name__ == "__main__":
  sys.exit(main())
