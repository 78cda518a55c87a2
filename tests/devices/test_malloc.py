# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys

import pytest

from paxlike.devices import malloc

# Page faults of the second of two equal blocks that a thread allocates, fills and frees; arguments:
# whose memory is kept ("all" or "own", of the main thread), and which thread it is.
SCRIPT = """
import ctypes, resource, sys, threading
from paxlike.devices import malloc
malloc.keep_heap(of_all_threads=sys.argv[1] == "all")
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
def fill():
  block = c.malloc(100 << 20)
  ctypes.memset(block, 1, 100 << 20)
  c.free(block)
def run():
  for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fill()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
  print(faults)
if sys.argv[2] == "main":
  run()
else:
  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
"""


def second_faults(kept: str, thread: str, **variables: str) -> int:
  environment = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"}
  output = subprocess.run(
    [sys.executable, "-c", SCRIPT, kept, thread],
    env=environment | variables | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return int(output.stdout)


@pytest.mark.skipif(malloc._function("mallopt") is None, reason="needs glibc")
def test_what_is_freed_is_used_again_unless_the_user_decides():
  num_pages = (100 << 20) // os.sysconf("SC_PAGE_SIZE")
  assert second_faults("all", "another") < num_pages / 100
  assert second_faults("own", "main") < num_pages / 100
  assert second_faults("own", "another") > num_pages / 2
  assert second_faults("all", "another", MALLOC_ARENA_MAX="8") > num_pages / 2


# What stays resident of large blocks that were freed while small ones between them were not.
PINNED = """
import ctypes, time
from paxlike.devices import malloc
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
c.free.argtypes = [ctypes.c_void_p]
def resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1])
before = resident()
large = []
for _ in range(1000):
  large.append(c.malloc(100_000))
  ctypes.memset(large[-1], 1, 100_000)
  c.malloc(5_000)  # Larger than any chunk that Python has freed before.
for block in large:
  c.free(block)
kept = resident() - before
with malloc.trimmed():
  deadline = time.monotonic() + 30
  while resident() - before > kept / 10 and time.monotonic() < deadline:
    time.sleep(0.1)
print(kept, resident() - before)
"""


@pytest.mark.skipif(malloc._function("malloc_trim") is None, reason="needs glibc")
def test_what_was_freed_goes_back_to_the_system():
  environment = {key: value for key, value in os.environ.items() if "MALLOC" not in key}
  output = subprocess.check_output([sys.executable, "-c", PINNED], env=environment)
  kept, left = map(int, output.split())
  assert kept > 10_000
  assert left < kept / 10
