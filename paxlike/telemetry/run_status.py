# SPDX-License-Identifier: Apache-2.0
"""Reads from a run's folder whether its job is still running, and which evaluations it has."""

import json
import socket
import sys
from collections.abc import Iterable

from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import UserError
from paxlike.processes import lease
from paxlike.processes.owner import is_there

RESULTS = "eval_out"  #: Folder of the results of evaluations.


def is_running(folder: epath.Path, observer: lease.Observer | None = None) -> bool:
  """Returns whether a job is running in `folder`, as far as can be known from here.

  A caller that polls passes the same `observer` each time: it compares successive heartbeats.

  Raises:
    UserError: The folder cannot be read.
  """
  path = folder / "status.json"
  with run_folder.reading(path):
    if not path.exists():
      return False
    data = file_io.read_bytes(path)
  try:
    status = json.loads(data)
    state, host, pid = status["state"], status["host"], status["pid"]
    if type(pid) is not int or pid <= 0:
      raise ValueError(f"no process has number {pid!r}")
  except file_io.MALFORMED as error:
    print(f"paxlike: {path} is damaged ({file_io.reason(error)}): skipped", file=sys.stderr)
    return False
  if state != "running":
    return False
  with run_folder.reading(folder):
    lives = (observer or lease.Observer(folder)).is_alive()
  # The run of an earlier version has no owner file, but `status.json` names its process.
  return host == socket.gethostname() and is_there(pid) if lives is None else lives


def state(folder: epath.Path) -> str | None:
  """Returns a run's state: running, finished, stopped, failed, lost or stalled; None: not started.

  Lost: its process has exited without writing its state.

  Raises:
    UserError: `status.json` is damaged or cannot be read.
  """
  path = folder / "status.json"
  with run_folder.reading(path):
    if not path.exists():
      return None
    data = file_io.read_bytes(path)
  try:
    found = str(json.loads(data)["state"])
  except file_io.MALFORMED as error:
    raise UserError(f"{path} is damaged: {file_io.reason(error)}.") from error
  return "lost" if found == "running" and not is_running(folder) else found


def result_of(folder: epath.Path, name: str, updates: int) -> epath.Path:
  """Returns the result file of an eval set after `updates` updates."""
  return folder / RESULTS / name / f"eval_{updates:08d}.json"


def lacks_evaluation(folder: epath.Path, names: Iterable[str], updates: int) -> bool:
  """Returns whether one of the eval sets `names` has no result after `updates` updates."""
  with run_folder.reading(folder):
    return not all(result_of(folder, name, updates).exists() for name in names)
