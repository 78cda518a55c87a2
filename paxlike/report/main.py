# SPDX-License-Identifier: Apache-2.0
"""The command `paxlike-report RUN... [--to=FILE.html]`, which writes a page of runs."""

import argparse
import sys
from collections.abc import Sequence

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.telemetry import console, run_paths

_HELP = """\
Writes one HTML page of one or several runs: curves, differences of knobs, evaluations, goodput,
metrics of layers, samples, memory and mesh. The page needs no other file and no network.
"""
MAX_RECORDS = 5000
_MAX_RECORDS_OF_ALL = 20_000  # About 12 MB.


def main() -> int:
  """Entry point of the `paxlike-report` command. Returns the exit status."""
  console.outlive_readers()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, or 2 for a user error."""
  return console.exit_status("paxlike-report", lambda: _report(argv))


def _report(argv: Sequence[str]) -> int:
  parser = console.Parser(prog="paxlike-report", description=_HELP, allow_abbrev=False)
  run_paths.add_argument(parser)
  parser.add_argument(
    "--to",
    metavar="FILE.html",
    type=console.path,
    help="default: RUN/report.html, or report.html for several",
  )
  parser.add_argument(
    "--max_records",
    metavar="N",
    type=_count,
    help=f"most training records shown per run (default: {MAX_RECORDS:,}, less if all runs together"
    f" exceed {_MAX_RECORDS_OF_ALL:,})",
  )
  parser.add_argument(
    "--fdl_allow_modules",
    metavar="A,B",
    default="",
    help="modules outside of paxlike that the runs' configuration may import",
  )
  options = parser.parse_args(argv)
  modules = [name for name in options.fdl_allow_modules.split(",") if name]
  paths = [path for given in options.runs for path in run_paths.within(given)]
  to = options.to or run_paths.default_output(options.runs, "report.html")
  advice = "" if options.to else " Name another file with --to=FILE.html."
  write(paths, to, max_records=options.max_records, allow_modules=modules, advice=advice)
  print(to)
  return 0


def write(
  paths: Sequence[str],
  to: str,
  *,
  title: str = "",
  max_records: int | None = None,
  allow_modules: Sequence[str] = (),
  advice: str = "",
):
  """Writes the page of the runs in these folders to a file.

  Args:
    paths: The folders.
    to: The file.
    title: Of the page; "": the name of the run, or how many there are.
    max_records: Records of training of each run; None: see `MAX_RECORDS`.
    allow_modules: Modules outside of paxlike that their configuration may import.
    advice: What the message says to do if the file cannot be written.

  Raises:
    UserError: A folder has no records, or something cannot be read or written.
  """
  names = [file_io.absolute(paths[0]).name] if len(paths) == 1 else run_paths.names(paths)
  for path in paths:
    run_paths.check(path)
  if max_records is None:
    max_records = max(10, min(MAX_RECORDS, _MAX_RECORDS_OF_ALL // len(paths)))
  leave_devices_alone()
  from paxlike.report import page, run_data

  runs = [
    run_data.read(path, name=name, max_records=max_records, allow_modules=allow_modules)
    for path, name in zip(paths, names, strict=True)
  ]
  text = page.html(runs, title=title or (names[0] if len(names) == 1 else f"{len(names)} runs"))
  try:
    file_io.write(file_io.absolute(to), text)
  except file_io.failures() as error:
    raise UserError(f"{to} cannot be written: {file_io.reason(error)}.{advice}") from error


def leave_devices_alone():
  """Keeps JAX, which computes shapes, from taking the memory of devices that runs may be using."""
  from paxlike.devices import jax_setup

  if not jax_setup.has_started():
    jax_setup.set_up(platform="cpu", gpu_plugin=False, keep_heap=False)


def _count(text: str) -> int:
  """Returns the value of --max_records."""
  if not text.isdecimal() or int(text) < 10:
    raise argparse.ArgumentTypeError("expected a number of at least 10")
  return int(text)


if __name__ == "__main__":
  sys.exit(main())
