# SPDX-License-Identifier: Apache-2.0
"""All records of a run: those of its metric files, and the results of evaluations besides."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.telemetry import metric_files, run_status


def exist(folder: epath.Path) -> bool:
  """Returns whether a folder has record files or results."""
  return bool(metric_files.files(folder)) or next(_result_files(folder), None) is not None


def read(folder: epath.Path) -> list[dict[str, Any]]:
  """Returns the records of the run in a folder, in order of updates if it has results besides.

  `--mode=eval`, also with `--continuous`, writes results but no records. The record of a result has
  no `time`. Damaged files are skipped with a line.
  """
  records = list(metric_files.records(folder))
  known = {(r.get("set"), r["updates"]) for r in records if r.get("kind") == "eval"}
  added = [one for one in _results(folder) if (one["set"], one["updates"]) not in known]
  return sorted([*records, *added], key=lambda record: record["updates"]) if added else records


def _results(folder: epath.Path) -> Iterator[dict[str, Any]]:
  for path in _result_files(folder):
    try:
      found = dict(json.loads(file_io.read_bytes(path)))
      updates = found.pop("checkpoint")
      if type(updates) is not int:
        raise TypeError(f"its checkpoint is {updates!r:.100}")
    except file_io.MALFORMED as error:
      print(f"paxlike: {path} is damaged ({file_io.reason(error)}): skipped", file=sys.stderr)
      continue
    record = {"kind": "eval", "set": path.parent.name, "updates": updates, "step": updates}
    yield record | {"loss": found.get("log_pplx")} | found


def _result_files(folder: epath.Path) -> Iterator[epath.Path]:
  for of_set in file_io.beginning_with(folder / run_status.RESULTS, ""):
    for path in file_io.beginning_with(of_set, "eval_"):
      if re.fullmatch(r"eval_\d+\.json", path.name):
        yield path
