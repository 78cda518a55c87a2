# SPDX-License-Identifier: Apache-2.0
"""A watchdog ends a process that does not arm it again, unless that was suspended."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from helpers.program import finish

_PROCESS = """
import sys, time
from paxlike.processes import stack_traces, watchdog
dog = watchdog.Watchdog()
with stack_traces.on_signal():
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


_FIRST = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")  # As in a container.


def process(*arguments: str, before=(), code=_PROCESS, err=subprocess.PIPE) -> subprocess.Popen:
  return subprocess.Popen(
    [*before, sys.executable, "-c", code, *arguments],
    stdout=subprocess.PIPE,
    stderr=err,
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


@pytest.mark.slow
def test_it_ends_though_nobody_reads_what_is_said():
  reader, writer = os.pipe()
  os.set_blocking(writer, False)
  with contextlib.suppress(BlockingIOError):
    while True:
      os.write(writer, b"x" * 4096)
  os.set_blocking(writer, True)
  one = process("stuck", err=writer)
  assert finish(one, timeout=60)[0] == -signal.SIGALRM
  os.close(reader)
  os.close(writer)


def can_be_first() -> bool:
  try:
    return subprocess.run([*_FIRST, "true"], capture_output=True, timeout=20).returncode == 0
  except OSError:
    return False


@pytest.mark.slow
def test_the_first_process_of_a_container_ends_too():
  """The kernel drops signals to it that have no handler."""
  if not can_be_first():
    pytest.skip("no namespaces of processes here")
  status, _, err = finish(process("stuck", before=_FIRST))
  assert status == signal.SIGALRM and "paxlike: it is stuck" in err
  code = "import time; from paxlike.processes import stack_traces; stack_traces.obey_sigterm()"
  first = process(before=_FIRST, code=f"{code}; print(flush=True); time.sleep(100)")
  assert first.stdout is not None and first.stdout.readline() == "\n"
  children = pathlib.Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
  os.kill(int(children[0]), signal.SIGTERM)
  assert finish(first, timeout=20)[0] == 143
