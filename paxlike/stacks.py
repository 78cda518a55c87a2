# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of this process: on a signal, and in files."""

import contextlib
import datetime
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from etils import epath

_ERRORS = 2  # The file of standard error, also where a test has put another in its place.
_KEPT = 20  # Files of a process that are kept of those written periodically.
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")

_prints_on_signal = False


@contextlib.contextmanager
def on_signal():
  """Context in which SIGUSR1 prints the stacks of all threads, and the run goes on.

  C code prints them, so that it works whatever holds the interpreter's lock. Python's handler does
  nothing, but has the number of the signal written to the file of `signal.set_wakeup_fd`. Within
  another such context, and in other threads than the main one, nothing changes.
  """
  global _prints_on_signal
  if _prints_on_signal or threading.current_thread() is not threading.main_thread():
    yield
    return
  _prints_on_signal = True
  previous = signal.signal(signal.SIGUSR1, lambda *unused: None)
  faulthandler.register(signal.SIGUSR1, file=_ERRORS, all_threads=True, chain=True)
  try:
    yield
  finally:
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, previous)
    _prints_on_signal = False


def text(heading: Iterable[str]) -> str:
  """Returns the stacks of all threads under a heading."""
  with tempfile.TemporaryFile("w+") as file:
    file.write("".join(f"{line}\n" for line in heading) + "\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read()


def write(folder: "epath.Path", index: int, content: str) -> "epath.Path":
  """Writes stacks of process `index` into the folder of a run; returns the file.

  Args:
    folder: The run's.
    index: The process.
    content: What `text` has returned.
  """
  return _write(folder, f"process_{index:05d}", content)


def write_periodic(folder: "epath.Path", index: int, content: str) -> "epath.Path":
  """Does as `write`, in a file of another name; only the newest of these stay."""
  name = f"periodic_{index:05d}"
  path = _write(folder, name, content)
  for old in sorted(path.parent.glob(f"{name}_*"))[:-_KEPT]:
    old.unlink(missing_ok=True)
  return path


def _write(folder: "epath.Path", name: str, content: str) -> "epath.Path":
  stacks = folder / "stacks"
  stacks.mkdir(parents=True, exist_ok=True)
  now = datetime.datetime.now()
  path = stacks / f"{name}_{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}.txt"
  path.write_text(content)
  return path


def of_main_thread(*, limit: int = 6) -> str:
  """Returns the innermost calls of the main thread."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  return "".join(traceback.format_stack(frame)[-limit:]).rstrip() if frame else ""


def is_debugged() -> bool:
  """Returns whether the main thread is in a debugger, so that a person decides when it goes on."""
  return any(name.split(".")[0] in _DEBUGGERS for name in _modules())


def waits_for_others() -> bool:
  """Returns whether the main thread is in a call that waits until all processes have made it."""
  return any("multihost" in name for name in _modules())


def _modules() -> Iterator[str]:
  """Yields the modules of the functions that the main thread is in, innermost first."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  while frame is not None:
    yield frame.f_globals.get("__name__") or ""
    frame = frame.f_back


def exit_at_once(status: int):
  """Ends the process without waiting for any thread."""
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  with contextlib.suppress(OSError, ValueError):
    sys.stderr.flush()
  os._exit(status)
