# SPDX-License-Identifier: Apache-2.0
"""Settings of glibc's allocator for this process; no effect with other C libraries."""

import contextlib
import ctypes
import os
import sys
import threading
from typing import Any

# Parameters of mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8


def keep_heap(*, of_all_threads: bool):
  """Keeps freed memory in the heap for reuse by later steps on a CPU: that of the main thread.

  A step allocates its temporaries as one block. By default, glibc returns the block to the system
  after each step, and page faults then cost an eighth of the time of a small step. Call it before
  threads start. No effect if the user has set MALLOC_ARENA_MAX.

  Args:
    of_all_threads: Whether to keep the large blocks of other threads, too. All threads then share
      one arena and wait for its lock, so that a compilation takes a fifth more CPU time.
  """
  mallopt = _function("mallopt")
  if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
    if of_all_threads:
      mallopt(ARENA_MAX, 1)
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)


def return_freed_heap():
  """Returns freed memory to the system.

  A compilation leaves hundreds of megabytes of freed memory in the allocator, which would add to
  the memory of the first step.
  """
  trim = _function("malloc_trim")
  if trim is not None:
    trim(0)


@contextlib.contextmanager
def trimmed():
  """Returns a context that returns freed memory to the system every second, for compilations."""
  ended = threading.Event()

  def trim():
    while not ended.wait(1):
      return_freed_heap()

  thread = threading.Thread(target=trim, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def _function(name: str) -> Any:
  """Returns a function of the C library, or None if it does not exist."""
  return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
