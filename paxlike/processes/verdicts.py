# SPDX-License-Identifier: Apache-2.0
"""Verdicts: why the watch ends a job, and how that is reported."""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from paxlike import file_io
from paxlike.errors import TEMPORARY, RunError, UserError, one_line

# How messages of a failed `absl::Status` begin.
_STATUS = re.compile(
  "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|RESOURCE_EXHAUSTED"
  "|UNAVAILABLE|UNKNOWN): "
)
_WRITE_SECONDS = 10.0  # Time-out for a last write: the run's folder may be what hangs.

#: Folders of the runs that this process trains. It writes `status.json` only in these.
trained: set[epath.Path] = set()

#: What a process still does when a verdict ends it, each for at most 10 seconds.
last_actions: list[Callable[["Verdict"], None]] = []

#: Set when the job ends by a verdict; no other code writes `status.json` afterwards.
is_over = threading.Event()
#: Held while checking `is_over` and writing `status.json`.
status_lock = threading.Lock()


class Verdict(NamedTuple):
  """Why a job ends.

  Attributes:
    kind: `lost`, `stalled` or `failed`, the state in `status.json`.
    index: The process that caused it.
    why: A sentence that names the process.
  """

  kind: str
  index: int
  why: str

  @property
  def status(self) -> int:
    """Exit status of the other processes, and of a stalled one."""
    return 1 if self.kind == "failed" else TEMPORARY

  def line(
    self,
    *,
    of: str | None,
    trains: bool = False,
    stacks: epath.Path | None = None,
    calls: str = "",
  ) -> str:
    """Returns the line that a process prints when it ends.

    Args:
      of: The name of this process in messages; None if it is the cause.
      trains: Whether the job trains; else it only reads another job's run.
      stacks: The file of its stacks.
      calls: The innermost calls of its main thread.
    """
    line = self.why if of is None else f"{self.why}; {of} ends too"
    line += f" (status {self.status})"
    if self.status == TEMPORARY:
      line += ". If started again, "
      line += "the job resumes from its newest checkpoint" if trains else "the job may succeed"
    if stacks is not None:
      line += f". Stacks: {stacks}"
    return f"{line}. The main thread of this process is in:\n{calls}" if calls else f"{line}."


def reason(error: BaseException) -> str:
  """Returns why a process fails, in one line for the other processes."""
  if isinstance(error, KeyboardInterrupt):
    return "interrupted (Ctrl-C)"
  text = one_line(error, limit=300)
  if isinstance(error, UserError | RunError) and text:
    return text.rstrip(".")
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_of_jax(error: BaseException | None) -> bool:
  """Returns whether an error is, or is caused by, a runtime error of JAX.

  In a job of several processes the root cause may be that another process is lost.
  """
  if "jax" not in sys.modules:
    return False
  import jax

  while error is not None:
    if isinstance(error, jax.errors.JaxRuntimeError) or _is_status(error):
      return True
    error = error.__cause__ or error.__context__
  return False


def _is_status(error: BaseException) -> bool:
  """Returns whether an error is XLA's, raised by C++ as a ValueError.

  This happens when an array is read whose computation failed (`ArrayImpl.__array__`).
  """
  trace = error.__traceback__
  while trace is not None and trace.tb_next is not None:
    trace = trace.tb_next
  raised_in = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
  return raised_in.startswith("jax") and _STATUS.match(str(error)) is not None


def is_timeout(reason: str) -> bool:
  """Returns whether a failure is a time-out of JAX waiting for another process."""
  return "DEADLINE_EXCEEDED" in reason or "timed out" in reason.lower()


def in_time(action: Callable[[], Any], *, seconds: float = _WRITE_SECONDS) -> Any:
  """Runs an action that writes, in a thread; returns its result, None on failure or time-out."""
  results: list[Any] = []

  def act():
    try:
      results.append(action())
    except file_io.failures():
      pass  # The job ends anyway, and its line is on the console.

  thread = threading.Thread(target=act, daemon=True)
  with contextlib.suppress(RuntimeError):  # The system may refuse another thread.
    thread.start()
    thread.join(seconds)
  return results[0] if results else None


def write_status(
  folder: epath.Path, verdict: Verdict, leader: tuple[str, int], *, wait: float = 0.0
):
  """Writes to `status.json` how the job has ended, unless it has finished or stopped.

  Args:
    folder: The run's folder; nothing is written if this process does not train that run.
    verdict: Why the job ends.
    leader: Host and process id of process 0, which owns the file. A file that names another process
      is of a later attempt, and is not changed.
    wait: Seconds to wait first, for another process to write it.
  """
  is_over.set()
  if folder not in trained:
    return
  time.sleep(wait)
  path = folder / "status.json"
  with status_lock:
    if not path.exists():
      return
    try:
      status = json.loads(file_io.read_bytes(path))
    except file_io.MALFORMED:
      return
    # "failed" may be a consequence of the failure of `verdict.index`.
    if not isinstance(status, dict) or status.get("state") not in ("running", "failed"):
      return
    if (status.get("host"), status.get("pid")) != tuple(leader):
      return
    now = {"state": verdict.kind, "reason": verdict.why, "time": time.time()}
    file_io.write(path, json.dumps(status | now) + "\n")
