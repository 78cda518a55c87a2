# SPDX-License-Identifier: Apache-2.0
"""The memory of this process, where the C library is glibc; elsewhere nothing is done."""

import contextlib
import ctypes
import os
import sys
import threading
from typing import Any

# Parameters of mallopt, from malloc.h.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8


def keep_heap():
  """Lets this process reuse the memory that it frees, for steps on a CPU.

  A step allocates what it works in as one block. By default the system takes that back after each
  step and hands it out anew, page by page: an eighth of the time of a small step. All threads now
  share one heap, which makes a first compilation slower by a third. Call it before they start;
  whoever sets MALLOC_ARENA_MAX decides on the heaps themselves.
  """
  mallopt = _function("mallopt")
  if mallopt is not None and "MALLOC_ARENA_MAX" not in os.environ:
    mallopt(ARENA_MAX, 1)
    mallopt(MMAP_MAX, 0)
    mallopt(TRIM_THRESHOLD, 2**31 - 1)


def return_freed_heap():
  """Gives memory that has been freed back to the system.

  A compilation leaves hundreds of megabytes in the allocator, which would add to the first step's.
  """
  trim = _function("malloc_trim")
  if trim is not None:
    trim(0)


@contextlib.contextmanager
def trimmed():
  """Context in which freed memory goes back each second: a compiler's threads would keep it."""
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
  """Returns a function of the C library, or None if it has none of this name."""
  return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
