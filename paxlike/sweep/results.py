# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep: one table, on the console and as JSON and CSV, and one page."""

import csv
import io
import json
import os
from collections.abc import Mapping
from typing import Any

from paxlike import file_io, run_folder
from paxlike.errors import UserError
from paxlike.report import main as report
from paxlike.sweep.definition import Sweep
from paxlike.telemetry import formatting, pace, run_records, run_status

FILES = ("results.json", "results.csv", "report.html")


def collect(sweep: Sweep, failures: Mapping[str, str]) -> list[dict[str, Any]]:
  """Returns a row for each run: its knobs, state, newest losses and speed.

  Args:
    sweep: The sweep.
    failures: Run -> message.
  """
  rows = []
  for name, combination in sweep.runs.items():
    folder = sweep.folder_of(name)
    with run_folder.reading(folder):
      records = run_records.read(folder)
    train = [record for record in records if record.get("kind") == "train"]
    evals = {r["set"]: r.get("loss") for r in records if r.get("kind") == "eval" and "set" in r}
    newest = train[-1] if train else {}
    state = run_status.state(folder)
    rows.append(
      {
        "run": name,
        "knobs": combination,
        "state": state or ("failed" if name in failures else "not started"),
        "updates": newest.get("updates"),
        "loss": newest.get("loss"),
        "eval_losses": evals,
        "tokens_per_second": pace.typical(records, "tokens_per_second"),
        "error": failures.get(name),
      }
    )
  return rows


def columns(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
  """Returns the rows as a flat table: its header, and the cells of each run."""
  knobs = list(dict.fromkeys(name for row in rows for name in row["knobs"]))
  sets = list(dict.fromkeys(name for row in rows for name in row["eval_losses"]))
  header = [*knobs, "state", "updates", "loss", *(f"loss of {name}" for name in sets)]
  header += ["tokens_per_second", "error"]
  cells = [
    [
      *(row["knobs"].get(name) for name in knobs),
      *(row[name] for name in ("state", "updates", "loss")),
      *(row["eval_losses"].get(name) for name in sets),
      row["tokens_per_second"],
      row["error"],
    ]
    for row in rows
  ]
  return header, cells


def text(rows: list[dict[str, Any]]) -> str:
  """Returns the table for the console, and a line that names the best run."""
  header, cells = columns(rows)
  shown = [[formatting.number(value, digits=5) for value in row[:-1]] for row in cells]
  num_knobs = header.index("state")
  right = range(num_knobs + 1, len(header) - 1)
  parts = [formatting.table(header[:-1], shown, right=right)]
  if best := _best(rows):
    parts.append(best)
  return "\n\n".join(parts)


def _best(rows: list[dict[str, Any]]) -> str:
  sets = {name for row in rows for name in row["eval_losses"]}
  lines = []
  for name in sorted(sets):
    losses = {row["run"]: row["eval_losses"].get(name) for row in rows}
    lines.append(_least(f"least loss on {name}", losses))
  if not sets:
    lines.append(_least("least training loss", {row["run"]: row["loss"] for row in rows}))
  return "\n".join(filter(None, lines))


def _least(what: str, losses: Mapping[str, Any]) -> str:
  known = {run: loss for run, loss in losses.items() if loss is not None}
  if not known:
    return ""
  run = min(known, key=known.__getitem__)
  return f"{what}: {known[run]:.4f} ({run})"


def write(sweep: Sweep, rows: list[dict[str, Any]], *, allow_modules: list[str]) -> list[str]:
  """Writes the table as JSON and CSV, and the page of the runs that have records.

  Returns the paths of the files.

  Raises:
    UserError: A file cannot be written.
  """
  header, cells = columns(rows)
  lines = io.StringIO()
  csv.writer(lines, lineterminator="\n").writerows(
    [["run", *header], *([row["run"], *line] for row, line in zip(rows, cells, strict=True))]
  )
  paths = [sweep.folder / name for name in FILES]
  with run_folder.writing(sweep.folder):
    file_io.write(paths[0], json.dumps(rows, indent=1) + "\n")
    file_io.write(paths[1], lines.getvalue())
  folders = [os.fspath(sweep.folder_of(row["run"])) for row in rows if row["updates"] is not None]
  if not folders:
    return [os.fspath(path) for path in paths[:2]]
  try:
    report.write(
      folders,
      os.fspath(paths[2]),
      title=f"Sweep {sweep.folder.name}",
      allow_modules=allow_modules,
    )
  except UserError as error:
    raise UserError(f"the page of the sweep: {error}") from error
  return [os.fspath(path) for path in paths]
