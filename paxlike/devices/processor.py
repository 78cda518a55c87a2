# SPDX-License-Identifier: Apache-2.0
"""The processor of this machine."""

import functools
import platform


@functools.cache
def is_from_intel() -> bool:
  """Returns whether Intel made this machine's processor; False if that is unknown."""
  try:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
      return "GenuineIntel" in file.read(2048)
  except OSError:
    return "GenuineIntel" in platform.processor()
