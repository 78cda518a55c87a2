# SPDX-License-Identifier: Apache-2.0
"""The Python stacks of this process: on a signal, in files, and where no Python code runs."""

import contextlib
import ctypes
import datetime
import errno
import faulthandler
import os
import signal
import socket
import struct
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
_RESUMED_SECONDS = 3  # In which a process that was suspended runs Python code again.

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


class _Read(ctypes.Structure):
  """`struct aiocb` as far as its users fill it in; C keeps the rest."""

  _fields_ = (
    ("file", ctypes.c_int),
    ("operation", ctypes.c_int),
    ("priority", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("size", ctypes.c_size_t),
    ("event", _Event),
    ("rest", ctypes.c_char * 128),
  )


class _Times(ctypes.Structure):
  """`struct itimerspec`."""

  _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "after", "after_ns"))


_NOTHING, _CALL = 1, 2  # SIGEV_NONE and SIGEV_THREAD.


class _Fuse:
  """Does something by C alone some seconds after a timer has fired, unless it is cut before.

  A timer also fires while the process is suspended, and all that were due act at once when it is
  continued. So the timer only begins a read from a socket on which nothing comes: its time-out
  counts from then on, in which Python code may cut it.
  """

  def __init__(self, libc: ctypes.CDLL, event: _Event, seconds: int):
    self._libc = libc
    self._ends = socket.socketpair()
    times = struct.pack("ll", seconds, 0)
    self._ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, times)
    self._buffer = ctypes.create_string_buffer(1)
    address = ctypes.addressof(self._buffer)
    self._read = _Read(self._ends[0].fileno(), 0, 0, address, 1, event)
    function = ctypes.cast(libc.aio_read, ctypes.c_void_p).value
    begin = _Event(ctypes.addressof(self._read), 0, _CALL, function)
    self._timer = ctypes.c_void_p()
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(begin), ctypes.byref(self._timer)):
      raise OSError("timer_create failed")

  def set(self, seconds: float | None):
    """Has the timer fire then; None: it rests."""
    whole, part = (0, 0.0) if seconds is None else divmod(seconds, 1)
    times = _Times(0, 0, int(whole), int(part * 1e9))
    self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None)

  def cut(self):
    """Deletes the timer, and ends the read if it has begun."""
    self._libc.timer_delete(self._timer)
    self._read.event.notify = _NOTHING
    self._ends[0].shutdown(socket.SHUT_RDWR)
    while self._libc.aio_error(ctypes.byref(self._read)) == errno.EINPROGRESS:
      time.sleep(0.001)
    for end in self._ends:
      end.close()


class Switch:
  """Ends the process unless the watch re-arms it in time, that is, when no Python code runs.

  A library that never gives the interpreter's lock back stops the watch too. Timers of the kernel
  do not need the lock: one prints a line, one raises SIGUSR1 (`on_signal` prints the stacks), and
  one asks for SIGALRM ten seconds later, which ends the process. Nothing is printed for a process
  that was only suspended: it re-arms the switch before.
  """

  def __init__(self):
    self._libc = ctypes.CDLL(None)
    self._line = ctypes.create_string_buffer(2048)
    self._fires = float("inf")
    self._cut: list[_Fuse] = []  # Their timers may have fired this moment: C has their addresses.
    self._fuses = self._made()

  def _made(self) -> list[_Fuse]:
    has_all = all(hasattr(self._libc, name) for name in ("timer_create", "aio_read", "warnx"))
    if not sys.platform.startswith("linux") or not has_all:
      return []  # Without them, nothing watches the watch.
    ctypes.c_char_p.in_dll(self._libc, "program_invocation_short_name").value = _PROGRAM
    functions = (("warnx", ctypes.addressof(self._line)), (None, 0), ("alarm", _END_SECONDS))
    fuses = []
    for delay, (name, value) in enumerate(functions):
      function = name and ctypes.cast(getattr(self._libc, name), ctypes.c_void_p).value
      event = _Event(value, signal.SIGUSR1, _CALL if name else 0, function)
      fuses.append(_Fuse(self._libc, event, _RESUMED_SECONDS + delay))
    return fuses

  def arm(self, seconds: float, line: str):
    """Has the process end after `seconds` and some more, with a line, unless this is called."""
    self._line.value = line.replace("%", "%%").encode()[: len(self._line) - 1]
    self._set(seconds)

  def disarm(self):
    """Stops the timers."""
    if self._fires < float("inf"):
      self._set(None)

  def close(self):
    """Gives the timers back."""
    for fuse in self._fuses:
      fuse.cut()
    self._cut += self._fuses
    self._fuses = []

  def _set(self, seconds: float | None):
    if self._fuses and time.monotonic() > self._fires:
      # The process was suspended meanwhile.
      self.close()
      self._libc.alarm(0)
      self._fuses = self._made()
    for fuse in self._fuses:
      fuse.set(seconds)
    self._fires = float("inf") if seconds is None else time.monotonic() + seconds


def exit_at_once(status: int):
  """Ends the process without waiting for any thread."""
  with contextlib.suppress(OSError, ValueError):
    sys.stdout.flush()
  with contextlib.suppress(OSError, ValueError):
    sys.stderr.flush()
  os._exit(status)
