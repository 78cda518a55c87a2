# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of this process: on a signal, in files, and where no Python code runs."""

import contextlib
import ctypes
import datetime
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from etils import epath

_ERRORS = 2  # The file of standard error, also where a test has put another in its place.
_KEPT = 20  # Files of a process that are kept of those written periodically.
_DEBUGGERS = ("bdb", "pdb", "pydevd", "debugpy")
_PROGRAM = b"paxlike"  # How lines of C begin; C keeps the address.
_END_SECONDS = 10  # Between the warning of the switch and the end.

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


class _Event(ctypes.Structure):
  """`struct sigevent` of 64-bit Linux."""

  _fields_ = (
    ("value", ctypes.c_void_p),
    ("signal", ctypes.c_int),
    ("notify", ctypes.c_int),
    ("function", ctypes.c_void_p),
    ("attributes", ctypes.c_void_p),
    ("rest", ctypes.c_char * 32),
  )


class _Times(ctypes.Structure):
  """`struct itimerspec`."""

  _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns"))


class Switch:
  """Ends the process when no Python code has run for a while: who shall arm it again, does not.

  A library that never gives the interpreter's lock back stops the watch too. The timers of the
  system do not need the lock: one prints a line, one raises SIGUSR1 (`on_signal` prints the
  stacks), and one asks for SIGALRM ten seconds later, which ends the process. A process that was
  only suspended arms the switch anew within these ten seconds.
  """

  def __init__(self):
    self._libc = ctypes.CDLL(None)
    self._line = ctypes.create_string_buffer(2048)
    self._timers: list[ctypes.c_void_p] = []
    self._fires = float("inf")
    if not sys.platform.startswith("linux") or not hasattr(self._libc, "timer_create"):
      return  # Without it, nothing watches the watch.
    ctypes.c_char_p.in_dll(self._libc, "program_invocation_short_name").value = _PROGRAM
    functions = (("warnx", ctypes.addressof(self._line)), (None, 0), ("alarm", _END_SECONDS))
    for name, value in functions:
      function = name and ctypes.cast(getattr(self._libc, name), ctypes.c_void_p).value
      event = _Event(value, signal.SIGUSR1, 2 if name else 0, function)
      timer = ctypes.c_void_p()
      if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError("timer_create failed")
      self._timers.append(timer)

  def arm(self, seconds: float, line: str):
    """Has the process end `seconds` from now, with a line, unless this is called before."""
    self._line.value = line.replace("%", "%%").encode()[: len(self._line) - 1]
    self._set(seconds)

  def disarm(self):
    """Nothing happens, however long no Python code runs."""
    if self._fires < float("inf"):
      self._set(None)

  def close(self):
    """Gives the timers back."""
    self.disarm()
    for timer in self._timers:
      self._libc.timer_delete(timer)
    self._timers.clear()

  def _set(self, seconds: float | None):
    """Sets the timers one second apart; None: they rest."""
    for delay, timer in enumerate(self._timers):
      whole, part = (0, 0.0) if seconds is None else divmod(seconds + delay, 1)
      times = _Times(0, 0, int(whole), int(part * 1e9))
      self._libc.timer_settime(timer, 0, ctypes.byref(times), None)
    if self._timers and time.monotonic() > self._fires:
      self._libc.alarm(0)  # The process was suspended meanwhile.
    self._fires = float("inf") if seconds is None else time.monotonic() + seconds


def exit_at_once(status: int):
  """Ends the process without waiting for any thread."""
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  with contextlib.suppress(OSError, ValueError):
    sys.stderr.flush()
  os._exit(status)
