# SPDX-License-Identifier: Apache-2.0
"""Paths of runs on a command line: those in a parent folder, and short names to tell them apart."""

import argparse
import itertools
import os
from collections.abc import Sequence

from etils import epath

from paxlike import run_folder
from paxlike.errors import UserError
from paxlike.telemetry import console, run_records


def within(path: str) -> list[str]:
  """Returns the path itself if it is a run's folder, else those of the runs in it with records."""
  folder = epath.Path(path)
  with run_folder.reading(path):
    if run_records.exist(folder) or not folder.is_dir():
      return [path]
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    runs = [child for child in inner if run_records.exist(child) and run_records.read(child)]
  return [os.fspath(run) for run in runs] or [path]


def names(paths: Sequence[str]) -> list[str]:
  """Returns the shortest distinct suffixes of paths, without their common suffix.

  Raises:
    UserError: A path is given twice.
  """
  parts = [(path if "://" in path else os.path.abspath(path)).split("/") for path in paths]
  parts = [[part for part in path if part] for path in parts]
  for number, path in enumerate(paths):
    if parts[number] in parts[:number]:
      raise UserError(f"{path} is given twice: leave one out.")
  if len(paths) == 1:
    return [os.path.normpath(paths[0])]
  while len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
    parts = [path[:-1] for path in parts]
  suffixes = (["/".join(path[-count:]) for path in parts] for count in itertools.count(1))
  return next(found for found in suffixes if len(set(found)) == len(found))


def check(path: str):
  """Raises a UserError if a path is not the folder of a run, which has records."""
  with run_folder.reading(path):
    found = run_records.exist(epath.Path(path))
  if not found:
    files = "metrics.jsonl, metrics/part-*.jsonl or results of evaluations"
    raise UserError(f"{path} is not the folder of a run: it has no {files}.")


def add_argument(parser: argparse.ArgumentParser):
  """Adds the argument `runs`, RUN..., to a parser."""
  parser.add_argument(
    "runs",
    nargs="+",
    metavar="RUN",
    type=console.path,
    help="the --job_log_dir of a run, or a folder of several",
  )


def default_output(runs: Sequence[str], name: str) -> str:
  """Returns the path of a file about these runs: in the folder of a single one, or here."""
  return f"{runs[0].rstrip('/')}/{name}" if len(runs) == 1 else name
