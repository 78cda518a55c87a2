# SPDX-License-Identifier: Apache-2.0
"""A watchdog: a small process that ends this one if its watch stops, as where no Python code runs.

A library that never gives the interpreter's lock back stops the watch too. The watchdog prints a
line, sends SIGUSR1 (`stacks.on_signal` prints the stacks) and, ten seconds later, SIGALRM. It
imports the standard library alone, so that it starts in milliseconds. A timer within this process
(`faulthandler.dump_traceback_later`) would end one that was suspended as soon as it is continued.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

_POLL = 0.2  # Seconds.
_LEFT_AFTER_PAUSE = 5.0  # Seconds in which a process that was suspended runs Python code again.
_SAY_SECONDS = 1.0
_END_SECONDS = 10.0  # Between SIGUSR1 and SIGALRM.


class Watchdog:
  """The watchdog of this process, started when it is first armed."""

  def __init__(self):
    self._process: subprocess.Popen[bytes] | None = None
    self._is_started = self._is_armed = False

  def arm(self, seconds: float, line: str):
    """Has the process end after `seconds`, with a line, unless this is called again before."""
    self._is_armed = True
    if not self._is_started:
      self._is_started = True
      if os.getpid() == 1:
        _exit_on_alarm()
      command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
      # Where no process can be started, nothing watches the watch, and the run goes on.
      with contextlib.suppress(OSError):
        # In a session of its own: Ctrl-C is for this process.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    self._send([seconds, line])

  def disarm(self):
    """Lets the process go on however long no Python code runs."""
    if self._is_armed:
      self._is_armed = False
      self._send(None)

  def close(self):
    """Ends the watchdog."""
    if self._process is not None:
      with contextlib.suppress(OSError):
        self._process.communicate()
      self._process = None

  def _send(self, what: list[float | str] | None):
    if self._process is None or self._process.stdin is None:
      return
    with contextlib.suppress(OSError):  # It may have been killed.
      self._process.stdin.write(json.dumps(what).encode() + b"\n")
      self._process.stdin.flush()


def _exit_on_alarm():
  """Has SIGALRM end this process with status 14, its number, by C code alone.

  As the first process of a container: from there, the kernel drops signals that have no handler.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
  libc.signal(signal.SIGALRM, ctypes.cast(libc._exit, ctypes.c_void_p))


def main(pid: int):
  """Is the watchdog of process `pid`, which writes to the standard input, until that is closed."""
  received, line, left = b"", "", float("inf")
  is_ending = False
  last = time.monotonic()
  while True:
    if select.select([0], [], [], _POLL)[0]:
      data = os.read(0, 2**16)
      if not data:
        return
      *messages, received = (received + data).split(b"\n")
      if messages:
        left, line = json.loads(messages[-1]) or (float("inf"), "")
        is_ending = False
    now = time.monotonic()
    # What was suspended together with this process was not stuck.
    tick, last = min(now - last, 2 * _POLL), now
    if _is_suspended(pid):
      left = max(left, _LEFT_AFTER_PAUSE)
      continue
    left -= tick
    if left > 0:
      continue
    if is_ending:
      os.kill(pid, signal.SIGALRM)
      return
    # In a thread: nobody may read it.
    saying = threading.Thread(target=_say, args=(f"paxlike: {line}\n",), daemon=True)
    saying.start()
    saying.join(_SAY_SECONDS)
    os.kill(pid, signal.SIGUSR1)
    is_ending, left = True, _END_SECONDS


def _say(line: str):
  with contextlib.suppress(OSError):
    os.write(2, line.encode(errors="backslashreplace"))


def _is_suspended(pid: int) -> bool:
  """Returns whether a process is stopped by a signal or a debugger, as far as /proc says."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
  except OSError:
    return False


if __name__ == "__main__":
  with contextlib.suppress(ProcessLookupError, KeyboardInterrupt):
    main(int(sys.argv[1]))
