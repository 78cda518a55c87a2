# SPDX-License-Identifier: Apache-2.0
"""Why a job ends that somebody else ends, and what its folder says of that afterwards."""

import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from paxlike import run_folder

#: EX_TEMPFAIL of sysexits.h: started again, the same command may succeed.
TEMPORARY = 75
_PATIENCE = 10.0  # Seconds for a file of a job that ends: its folder may be what is stuck.

#: Set once the job ends by a verdict, after which nobody else writes `status.json`.
is_over = threading.Event()
#: Held by who looks at `is_over` and writes.
status_lock = threading.Lock()


class Verdict(NamedTuple):
  """Why a job ends.

  Attributes:
    kind: `lost`, `stalled` or `failed`, as `status.json` says.
    index: The process because of which it ends.
    why: A sentence that names the process.
  """

  kind: str
  index: int
  why: str

  @property
  def status(self) -> int:
    """With which the other processes, and one that is stuck, exit."""
    return 1 if self.kind == "failed" else TEMPORARY


def in_time(action: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
  """Does something that writes, in a thread; returns its result, None if it fails or takes long."""
  results: list[Any] = []

  def act():
    try:
      results.append(action(*arguments, **named))
    except run_folder.failures():
      pass  # The job ends all the same, and its line is on the console.

  thread = threading.Thread(target=act, daemon=True)
  thread.start()
  thread.join(_PATIENCE)
  return results[0] if results else None


def write_status(
  folder: epath.Path, verdict: Verdict, leader: tuple[str, int] | None, *, wait: float = 0.0
):
  """Says in `status.json` how the job has ended, unless it has finished or stopped.

  Args:
    folder: The run's.
    verdict: Why it ends.
    leader: Host and process id of process 0, who has written the file: that of another attempt is
      left alone. None: this process is alone.
    wait: Seconds in which another process may write it.
  """
  is_over.set()
  time.sleep(wait)
  path = folder / "status.json"
  with status_lock:
    if not path.exists():
      return
    try:
      status = json.loads(run_folder.read_bytes(path))
    except (ValueError, RecursionError):
      return
    # This process may have failed because of the one that the verdict names.
    if not isinstance(status, dict) or status.get("state") not in ("running", "failed"):
      return
    if leader is not None and (status.get("host"), status.get("pid")) != tuple(leader):
      return
    now = {"state": verdict.kind, "reason": verdict.why, "time": time.time()}
    run_folder.write(path, json.dumps(status | now) + "\n")
