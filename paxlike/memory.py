# SPDX-License-Identifier: Apache-2.0
"""The memory of this process."""

import ctypes
import sys


def return_freed_heap():
  """Gives memory that has been freed back to the system, where the C library is glibc.

  A compilation leaves hundreds of megabytes in the allocator, which would add to the first step's.
  """
  if sys.platform == "linux":
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
      trim(0)
