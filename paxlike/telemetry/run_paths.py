# SPDX-License-Identifier: Apache-2.0
"""Paths of runs on a command line: those in a parent folder, and short names to tell them apart."""

import os
from collections.abc import Sequence

from etils import epath

from paxlike import run_folder
from paxlike.errors import UserError
from paxlike.telemetry import metric_files


def within(path: str) -> list[str]:
  """Returns the path itself if it is a run's folder, else those of the runs in it with records."""
  folder = epath.Path(path)
  with run_folder.reading(path):
    if metric_files.files(folder) or not folder.is_dir():
      return [path]
    inner = [child for child in sorted(folder.iterdir()) if child.is_dir()]
    runs = [child for child in inner if metric_files.files(child)]
    runs = [run for run in runs if next(iter(metric_files.records(run)), None) is not None]
  return [os.fspath(run) for run in runs] or [path]


def names(paths: Sequence[str]) -> list[str]:
  """Returns the shortest distinct suffixes of paths, without their common suffix.

  Raises:
    UserError: A path is given twice.
  """
  parts = [(path if "://" in path else os.path.abspath(path)).split("/") for path in paths]
  parts = [[part for part in path if part] for path in parts]
  if len(paths) == 1:
    return [os.path.normpath(paths[0])]
  while len({path[-1] for path in parts}) == 1 and min(map(len, parts)) > 1:
    parts = [path[:-1] for path in parts]
  for count in range(1, max(map(len, parts)) + 1):
    found = ["/".join(path[-count:]) for path in parts]
    if len(set(found)) == len(found):
      return found
  raise UserError("the same run is given twice.")


def check(path: str):
  """Raises a UserError if a path is not the folder of a run, which has records."""
  with run_folder.reading(path):
    found = metric_files.files(epath.Path(path))
  if not found:
    names_of_files = "metrics.jsonl or metrics/part-*.jsonl"
    raise UserError(f"{path} is not the folder of a run: it has no {names_of_files}.")
