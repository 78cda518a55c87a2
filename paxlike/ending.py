# SPDX-License-Identifier: Apache-2.0
"""Why the watch ends a job."""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from etils import epath

from paxlike import run_folder
from paxlike.errors import RunError, UserError, one_line

#: EX_TEMPFAIL of sysexits.h: started again, the same command may succeed.
TEMPORARY = 75
# How messages of a failed `absl::Status` begin.
_STATUS = re.compile(
  "(ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|RESOURCE_EXHAUSTED"
  "|UNAVAILABLE|UNKNOWN): "
)
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
    """Exit status of the other processes, and of a stuck one."""
    return 1 if self.kind == "failed" else TEMPORARY

  def line(self, *, of: str | None, stacks: epath.Path | None = None, calls: str = "") -> str:
    """Returns what a process prints that ends so.

    Args:
      of: What lines call this process; None: the job ends because of it.
      stacks: The file of its stacks.
      calls: The innermost of its main thread.
    """
    line = self.why if of is None else f"{self.why}; so {of} ends too"
    line += f" (status {self.status})"
    if self.status == TEMPORARY:
      line += ". Started again, the job goes on from its newest checkpoint"
    if stacks is not None:
      line += f". Stacks: {stacks}"
    return f"{line}. The main thread of this process is in:\n{calls}" if calls else f"{line}."


def reason(error: BaseException) -> str:
  """Returns in one line why a process fails, for the others."""
  if isinstance(error, KeyboardInterrupt):
    return "interrupted (Ctrl-C)"
  text = one_line(error, limit=300)
  if isinstance(error, UserError | RunError) and text:
    return text.rstrip(".")
  return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_of_jax(error: BaseException | None) -> bool:
  """Returns whether an error is, or follows from, one that JAX has met in running a program.

  In a job of several processes the reason may be that another one is gone.
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
  """Returns whether an error is one of XLA's that its C++ has raised as a ValueError.

  As it does where an array that could not be computed is read (`ArrayImpl.__array__`).
  """
  trace = error.__traceback__
  while trace is not None and trace.tb_next is not None:
    trace = trace.tb_next
  raised_in = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
  return raised_in.startswith("jax") and _STATUS.match(str(error)) is not None


def is_timeout(reason: str) -> bool:
  """Returns whether JAX has waited for another process in vain."""
  return "DEADLINE_EXCEEDED" in reason or "timed out" in reason.lower()


def in_time(action: Callable[[], Any], *, seconds: float = _PATIENCE) -> Any:
  """Does something that writes, in a thread; returns its result, None if it fails or takes long."""
  results: list[Any] = []

  def act():
    try:
      results.append(action())
    except run_folder.failures():
      pass  # The job ends all the same, and its line is on the console.

  thread = threading.Thread(target=act, daemon=True)
  with contextlib.suppress(RuntimeError):  # There may be no room for a thread.
    thread.start()
    thread.join(seconds)
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
    except run_folder.MALFORMED:
      return
    # This process may have failed because of the one that the verdict names.
    if not isinstance(status, dict) or status.get("state") not in ("running", "failed"):
      return
    if leader is not None and (status.get("host"), status.get("pid")) != tuple(leader):
      return
    now = {"state": verdict.kind, "reason": verdict.why, "time": time.time()}
    run_folder.write(path, json.dumps(status | now) + "\n")
