# SPDX-License-Identifier: Apache-2.0
"""The memory of this process, where the C library is glibc; elsewhere nothing is done."""

import ctypes
import os
import sys
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


def _function(name: str) -> Any:
  """Returns a function of the C library, or None if it has none of this name."""
  return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
