# SPDX-License-Identifier: Apache-2.0
"""A watchdog: a small process that ends the process that started it if its watch no longer runs.

The watch (`job_watch`) is a thread, which stops if a C library never releases the GIL. Then the
watchdog prints a line, sends SIGUSR1 (`stack_traces.on_signal` prints stacks) and, ten seconds
later, SIGALRM. It imports only the standard library, so that it starts in milliseconds. A timer
within the watched process (`faulthandler.dump_traceback_later`) would fire as soon as that is
continued after a suspension.
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
_LEFT_AFTER_PAUSE = 5.0  # Seconds for a continued process to run Python code again.
_SAY_SECONDS = 1.0
_END_SECONDS = 10.0  # Between SIGUSR1 and SIGALRM.


class Watchdog:
  """The watchdog of this process, started when it is first armed."""

  def __init__(self):
    self._process: subprocess.Popen[bytes] | None = None
    self._is_started = self._is_armed = False

  def arm(self, seconds: float, line: str):
    """Ends the process after `seconds`, printing `line`, unless called again or disarmed before."""
    self._is_armed = True
    if not self._is_started:
      self._is_started = True
      if os.getpid() == 1:
        _exit_on_alarm()
      command = [sys.executable, "-I", "-S", __file__, str(os.getpid())]
      # If no process can be started, the run continues without a watchdog.
      with contextlib.suppress(OSError):
        # In its own session, so that Ctrl-C does not reach it.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    self._send([seconds, line])

  def disarm(self):
    """Removes the time limit."""
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
  """Makes SIGALRM end this process with status 14, without running Python code.

  Needed for pid 1 of a container, for which the kernel drops signals without a handler.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
  libc.signal(signal.SIGALRM, ctypes.cast(libc._exit, ctypes.c_void_p))


def main(pid: int):
  """Runs the watchdog of process `pid`, which writes to stdin, until stdin is closed."""
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
    # Time while this process was suspended does not count: the other one was suspended too.
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
    # In a thread: the write blocks if nobody reads stderr.
    saying = threading.Thread(target=_say, args=(f"paxlike: {line}\n",), daemon=True)
    saying.start()
    saying.join(_SAY_SECONDS)
    os.kill(pid, signal.SIGUSR1)
    is_ending, left = True, _END_SECONDS


def _say(line: str):
  with contextlib.suppress(OSError):
    os.write(2, line.encode(errors="backslashreplace"))


def _is_suspended(pid: int) -> bool:
  """Returns whether a process is stopped by a signal or a debugger, according to /proc."""
  try:
    with open(f"/proc/{pid}/stat", "rb") as file:
      return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
  except OSError:
    return False


if __name__ == "__main__":
  with contextlib.suppress(ProcessLookupError, KeyboardInterrupt):
    main(int(sys.argv[1]))
