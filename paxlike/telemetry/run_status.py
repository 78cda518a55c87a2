# SPDX-License-Identifier: Apache-2.0
"""Reads from a run's folder its status, and which evaluations it has."""

import json
import re
import socket
import sys
from collections.abc import Iterable
from typing import NamedTuple

from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import UserError
from paxlike.processes import lease
from paxlike.processes.owner import is_there

RESULTS = "eval_out"  #: Folder of the results of evaluations.


class RunStatus(NamedTuple):
  """What is known of a run.

  Attributes:
    state: running, finished, stopped, failed, stalled or lost. Lost: its process exited, or has
      written no heartbeat for minutes, without writing its state.
    step: The completed updates; None if unknown.
    num_steps: The updates in all; None if unknown.
  """

  state: str
  step: int | None
  num_steps: int | None


def read(folder: epath.Path, observer: lease.Observer | None = None) -> RunStatus | None:
  """Returns the status of the run in a folder; None if it was not started.

  A caller that polls passes the same `observer` each time, which compares successive heartbeats. A
  single look compares the heartbeat's time with the clock.

  Raises:
    UserError: `status.json` is damaged, or the folder cannot be read.
  """
  path = folder / "status.json"
  with run_folder.reading(path):
    if not path.exists():
      return None
    data = file_io.read_bytes(path)
  try:
    status = json.loads(data)
    state = str(status["state"])
    steps = [status.get(key) for key in ("step", "num_steps")]
    host, pid = status.get("host"), status.get("pid")
  except file_io.MALFORMED as error:
    raise UserError(f"{path} is damaged: {file_io.reason(error)}.") from error
  if state == "running":
    with run_folder.reading(folder):
      lives = lease.seems_alive(folder) if observer is None else observer.is_alive()
    if lives is None:
      # The run of an earlier version has no owner file, but `status.json` names its process.
      known = host == socket.gethostname() and type(pid) is int and pid > 0
      lives = known and is_there(pid)
    state = "running" if lives else "lost"
  return RunStatus(state, *(step if type(step) is int else None for step in steps))


def state(folder: epath.Path) -> str | None:
  """Returns the state of the run in a folder, see `RunStatus`; None if it was not started.

  Raises:
    UserError: `status.json` is damaged, or the folder cannot be read.
  """
  status = read(folder)
  return None if status is None else status.state


def is_running(folder: epath.Path, observer: lease.Observer) -> bool:
  """Returns whether a job is running in `folder`; False, with a line, if its status is damaged.

  Raises:
    UserError: The folder cannot be read.
  """
  try:
    status = read(folder, observer)
  except UserError as error:
    if not isinstance(error.__cause__, file_io.MALFORMED):
      raise
    print(f"paxlike: {str(error).rstrip('.')}: skipped", file=sys.stderr)
    return False
  return status is not None and status.state == "running"


def result_of(folder: epath.Path, name: str, updates: int) -> epath.Path:
  """Returns the result file of an eval set after `updates` updates."""
  return folder / RESULTS / name / f"eval_{updates:08d}.json"


def results_after(folder: epath.Path, updates: int) -> list[epath.Path]:
  """Returns the result files, of all eval sets, of more than `updates` updates."""
  found = (folder / RESULTS).glob("*/eval_*.json*") if (folder / RESULTS).exists() else []
  numbers = [(re.fullmatch(r"eval_([0-9]+)\.jsonl?", path.name), path) for path in found]
  return [path for number, path in numbers if number and int(number[1]) > updates]


def lacks_evaluation(folder: epath.Path, names: Iterable[str], updates: int) -> bool:
  """Returns whether one of the eval sets `names` has no result after `updates` updates."""
  with run_folder.reading(folder):
    return not all(result_of(folder, name, updates).exists() for name in names)
