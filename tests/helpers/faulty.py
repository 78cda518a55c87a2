# SPDX-License-Identifier: Apache-2.0
"""The program, which gets stuck where a file says so: `python faulty.py FILE flags...`.

FILE holds a kind of phase (`processes.phases.KINDS`), and the program sleeps when it next enters
such a phase, as FILE.stuck then says. From then on, and not before, since the machine may be busy,
five seconds without progress are too many. `KIND patient` leaves the limit as it is; `KIND locked`
has the program keep the interpreter's lock meanwhile; `KIND raises` fails instead. Asked to stop
while it is stuck, it has three seconds.
"""

import ctypes
import pathlib
import sys
import threading
import time
from typing import Any

from paxlike import main
from paxlike.processes import phases, stall_detector

LIMIT, GRACE = 5.0, 3.0  # Seconds.


def get_stuck(fault: pathlib.Path):
  """Has phases be entered as the file says."""
  enter = phases.enter

  def entering(kind: str, of: object = "", **how: Any):
    enter(kind, of, **how)
    words = fault.read_text().split() if fault.exists() else [""]
    if words[:1] == [kind]:
      fault.with_name(f"{fault.name}.stuck").touch()
      if words[-1] == "raises":
        raise RuntimeError("disk quota exceeded")
      stall_detector.GRACE = GRACE
      if words[-1] != "patient":
        phases.OWN.limit = lambda kind, given: LIMIT
      if words[-1] == "locked":
        time.sleep(3)  # Until the watch has seen the limit.
        lock = ctypes.create_string_buffer(64)  # Of zeros: a mutex, which no signal interrupts.
        for _ in range(2):
          ctypes.PyDLL(None).pthread_mutex_lock(lock)
      threading.Event().wait()

  phases.enter = entering
  stall_detector.BEYOND = 3.0


if __name__ == "__main__":
  get_stuck(pathlib.Path(sys.argv.pop(1)))
  main.run()
