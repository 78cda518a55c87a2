# SPDX-License-Identifier: Apache-2.0
"""The command `paxlike-sweep`, which trains combinations of knobs."""

import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.sweep import combinations
from paxlike.telemetry import console

if TYPE_CHECKING:
  from paxlike.sweep.definition import Sweep

_HELP = """\
Trains a run for each combination of knobs, one after another. The graphs of all are checked first.
The same command again skips finished runs and resumes the others; values may be added. Writes a
table (results.json, results.csv) and a page (report.html) of all runs into DIR. All other flags
are those of paxlike. Exits with 1 if a run failed.
"""


def main() -> int:
  """Entry point of the `paxlike-sweep` command. Returns the exit status."""
  console.outlive_readers()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line.

  Returns the exit status: 0, 1 if a run failed, 2 for a user error, 128 + the signal if stopped.
  """
  return console.exit_status("paxlike-sweep", lambda: _sweep(argv))


def _parser() -> console.Parser:
  parser = console.Parser(
    prog="paxlike-sweep",
    description=_HELP,
    allow_abbrev=False,
    usage="paxlike-sweep --sweep.NAME=[VALUE,...]... --job_log_dir=DIR --fdl_config=NAME ...",
  )
  parser.add_argument(
    "--sweep.NAME",
    metavar="[VALUE,...]",
    help="values to try for a knob (UPPER_CASE) or a graph path (lower_case). Several --sweep"
    " flags: every combination",
  )
  parser.add_argument(
    "--zip", action="store_true", help="combine the first values, the second values, ... instead"
  )
  parser.add_argument(
    "--combinations",
    metavar="FILE.json",
    type=console.path,
    help='a JSON list of combinations: [{"LEARNING_RATE": 1e-3, "NUM_LAYERS": 2}, ...]',
  )
  parser.add_argument(
    "--job_log_dir",
    metavar="DIR",
    type=console.path,
    required=True,
    help="folder of the sweep, in which each run has its own",
  )
  parser.add_argument(
    "--launch",
    metavar="'TARGET ...'",
    help="submit each run with paxlike-launch: its target and flags, such as 'slurm --nodes=2'",
  )
  return parser


def _sweep(argv: Sequence[str]) -> int:
  environment = dict(os.environ)  # What follows sets variables for this process alone.
  swept, rest = combinations.lists(argv)
  options, flags = _parser().parse_known_args(rest)
  _check_flags(flags, swept)
  words = None if options.launch is None else _words(options.launch)
  listed = [] if options.combinations is None else combinations.read(options.combinations)
  found = combinations.joined(swept, listed, in_step=options.zip)

  from paxlike.sweep import jobs
  from paxlike.sweep.definition import Sweep

  sweep = Sweep(
    folder=file_io.absolute(options.job_log_dir),
    flags=tuple(flags),
    runs=combinations.named(found),
  )
  sweep.check()
  if words is not None:
    jobs.check(sweep, words)
  with sweep.owned():
    return _run(sweep, words, environment)


def _run(sweep: "Sweep", words: Sequence[str] | None, environment: Mapping[str, str]) -> int:
  """Runs a sweep, which has been checked; returns the exit status.

  Args:
    sweep: The sweep, whose folder is owned.
    words: The target of `paxlike-launch` and its flags; None: the runs are trained here.
    environment: The environment of the runs.
  """
  from paxlike.sweep import execution, jobs, results

  sweep.keep()
  stopped_by = None
  if words is None:
    failures, stopped_by = execution.run_here(sweep, environment)
  else:
    failures = jobs.launch(sweep, words)
  rows = results.collect(sweep, failures)
  print(f"\n{results.text(rows)}\n")
  for path in results.write(sweep, rows, allow_modules=_modules(sweep.flags)):
    print(path)
  if stopped_by is not None:
    print("paxlike-sweep: stopped; the same command goes on.", file=sys.stderr)
    return 128 + stopped_by
  return 1 if failures else 0


def _check_flags(flags: Sequence[str], swept: dict[str, list[str]]):
  """Raises a UserError if a flag sets what is swept."""
  for flag in flags:
    name = flag.removeprefix("--fdl.").partition("=")[0]
    if flag.startswith("--fdl.") and name in swept:
      raise UserError(f"{flag}: {combinations.PREFIX}{name} sets it too: leave one out.")


def _words(text: str) -> list[str]:
  try:
    words = shlex.split(text)
  except ValueError as error:
    raise UserError(f"--launch={text}: {error}.") from None
  if not words:
    raise UserError("--launch: expected a target of paxlike-launch, such as 'slurm --nodes=2'.")
  return words


def _modules(flags: Sequence[str]) -> list[str]:
  """Returns the modules that the runs may name: of --fdl_config and --fdl_allow_modules."""
  pairs = [flag.partition("=") for flag in flags]
  named = [text for name, _, text in pairs if name in ("--fdl_config", "--exp") and "." in text]
  allowed = [text.split(",") for name, _, text in pairs if name == "--fdl_allow_modules"]
  return [*(name.rpartition(".")[0] for name in named), *itertools.chain(*allowed)]


if __name__ == "__main__":
  sys.exit(main())
