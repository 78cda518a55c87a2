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
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
  from etils import epath

_ERRORS = 2  # The file of standard error, also where a test has put another in its place.
_KEPT = 20  # Files of a process that are kept of those written periodically.
_FLUSH_SECONDS = 2.0
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
  with _in_memory() as file:
    file.write("".join(f"{line}\n" for line in heading) + "\n")
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
    file.seek(0)
    return file.read()


def _in_memory() -> TextIO:
  """Returns a file that the disk need have no room for, where the system has such files."""
  if not hasattr(os, "memfd_create"):
    return tempfile.TemporaryFile("w+", errors="backslashreplace")
  return open(os.memfd_create("stacks"), "w+", errors="backslashreplace")


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
  others = [file for file in path.parent.glob(f"{name}_*") if file != path]
  # By when they were written, and never this one: clocks may go back.
  for old in sorted(others, key=lambda file: file.stat().mtime)[: 1 - _KEPT]:
    old.unlink(missing_ok=True)
  return path


def _write(folder: "epath.Path", name: str, content: str) -> "epath.Path":
  stacks = folder / "stacks"
  stacks.mkdir(parents=True, exist_ok=True)
  now = datetime.datetime.now(datetime.UTC)
  path = stacks / f"{name}_{now:%Y%m%dT%H%M%S}.{now.microsecond // 1000:03d}.txt"
  path.write_text(content)
  return path


def is_printing() -> bool:
  """Returns whether the main thread is writing to the console, whose reader may take nothing."""
  return next(_modules(), "") == "paxlike.console"


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


def obey_sigterm():
  """Has SIGTERM end this process, which loses nothing by it, with what shells call status 143.

  For the first process of a container by a handler: the kernel drops signals to it without one.
  """
  if threading.current_thread() is threading.main_thread():
    by_handler = os.getpid() == 1
    handler = (lambda *unused: os._exit(128 + signal.SIGTERM)) if by_handler else signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)


def exit_at_once(status: int):
  """Ends the process without waiting for any thread, nor for a reader that takes no output."""

  def flush():
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()

  with contextlib.suppress(RuntimeError):  # There may be no room for a thread.
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
  os._exit(status)
