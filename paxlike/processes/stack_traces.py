# SPDX-License-Identifier: Apache-2.0
"""Stack traces of this process: printed on a signal, and written to files."""

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

_ERRORS = 2  # The file descriptor of stderr, even if `sys.stderr` was replaced.
_KEPT = 20  # Number of periodic files that are kept per process.
_FLUSH_SECONDS = 2.0
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")

_prints_on_signal = False


@contextlib.contextmanager
def on_signal():
  """Context in which SIGUSR1 prints the stacks of all threads, and the run continues.

  C code prints them, so it works while another thread holds the GIL. The empty Python handler is
  needed for the signal to be written to `signal.set_wakeup_fd`. A nested context, or one outside
  of the main thread, does nothing.
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
  """Returns a file in memory, so that a full disk does not matter; on disk if unsupported."""
  if not hasattr(os, "memfd_create"):
    return tempfile.TemporaryFile("w+", errors="backslashreplace")
  return open(os.memfd_create("stacks"), "w+", errors="backslashreplace")


def write(folder: "epath.Path", index: int, content: str) -> "epath.Path":
  """Writes stacks into the folder of a run; returns the file.

  Args:
    folder: The run's folder.
    index: Index of the process.
    content: The result of `text`.
  """
  return _write(folder, f"process_{index:05d}", content)


def write_periodic(folder: "epath.Path", index: int, content: str) -> "epath.Path":
  """Same as `write`, with another file name; only the newest 20 are kept."""
  from paxlike import file_io

  name = f"periodic_{index:05d}"
  path = _write(folder, name, content)
  others = [file for file in path.parent.glob(f"{name}_*") if file != path]
  # Sorted by modification time, and never this one: clocks may go back.
  for old in sorted(others, key=lambda file: file_io.stat(file).mtime)[: 1 - _KEPT]:
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
  """Returns whether the main thread is writing to the console, which may block."""
  return next(_modules(), "") == "paxlike.telemetry.console"


def of_main_thread(*, limit: int = 6) -> str:
  """Returns the innermost calls of the main thread."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  return "".join(traceback.format_stack(frame)[-limit:]).rstrip() if frame else ""


def is_debugged() -> bool:
  """Returns whether the main thread is in a debugger, where a stall is intended."""
  return any(name.split(".")[0] in _DEBUGGERS for name in _modules())


def waits_for_others() -> bool:
  """Returns whether the main thread is in a barrier or collective of all processes."""
  return any("multihost" in name for name in _modules())


def _modules() -> Iterator[str]:
  """Yields the modules of the functions that the main thread is in, innermost first."""
  frame = sys._current_frames().get(threading.main_thread().ident or 0)
  while frame is not None:
    yield frame.f_globals.get("__name__") or ""
    frame = frame.f_back


def obey_sigterm():
  """Makes SIGTERM end this process at once, with status 143 as a shell reports it.

  For times when there is nothing to save. Pid 1 of a container needs a handler, since the kernel
  drops signals without one.
  """
  if threading.current_thread() is threading.main_thread():
    by_handler = os.getpid() == 1
    handler = (lambda *unused: os._exit(128 + signal.SIGTERM)) if by_handler else signal.SIG_DFL
    signal.signal(signal.SIGTERM, handler)


def exit_at_once(status: int):
  """Ends the process without waiting for threads or for blocked output."""

  def flush():
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()

  with contextlib.suppress(RuntimeError):  # The system may refuse another thread.
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
  os._exit(status)
