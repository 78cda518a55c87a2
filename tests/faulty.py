# SPDX-License-Identifier: Apache-2.0
"""The program, which gets stuck where a file says so: `python tests/faulty.py FILE flags...`.

FILE holds a kind of phase (`paxlike.progress.KINDS`), and the program sleeps when it next enters
such a phase; `KIND locked` has it keep the interpreter's lock meanwhile.
"""

import ctypes
import pathlib
import sys
import threading

from paxlike import main, progress


def get_stuck(fault: pathlib.Path):
  """Has phases be entered as the file says."""
  enter = progress.enter

  def entering(kind: str, of: object = ""):
    enter(kind, of)
    words = fault.read_text().split() if fault.exists() else [""]
    if words[:1] == [kind]:
      if words[-1] == "locked":
        lock = ctypes.create_string_buffer(64)  # Of zeros: a mutex, which no signal interrupts.
        for _ in range(2):
          ctypes.PyDLL(None).pthread_mutex_lock(lock)
      threading.Event().wait()

  progress.enter = entering


if __name__ == "__main__":
  get_stuck(pathlib.Path(sys.argv.pop(1)))
  main.run()
