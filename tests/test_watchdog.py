# SPDX-License-Identifier: Apache-2.0
"""A watchdog ends a process that does not arm it again, unless that was suspended."""

import signal
import subprocess
import sys
import time

import pytest
from program import finish

_PROCESS = """
import sys, time
from paxlike import stacks, watchdog
dog = watchdog.Watchdog()
with stacks.on_signal():
  for _ in range(30):
    dog.arm(1.0, "it is stuck")
    time.sleep(0.1)
  if "stuck" in sys.argv:
    time.sleep(100)
  dog.disarm()
  time.sleep(1.5)
dog.close()
print("done")
"""


def process(*arguments: str) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, "-c", _PROCESS, *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.mark.slow
def test_a_process_that_was_suspended_goes_on_and_nothing_is_printed():
  suspended = process()
  time.sleep(1)
  suspended.send_signal(signal.SIGSTOP)
  time.sleep(3)
  suspended.send_signal(signal.SIGCONT)
  assert finish(suspended) == (0, "done\n", "")


@pytest.mark.slow
def test_a_process_that_does_not_arm_it_again_ends_with_a_line_and_its_stacks():
  status, _, err = finish(process("stuck"))
  assert status == -signal.SIGALRM
  assert err.startswith("paxlike: it is stuck\n") and "Current thread" in err
