# SPDX-License-Identifier: Apache-2.0
"""The folder of compiled programs, which the workers and later sessions of tests share."""

import contextlib
import os
import pathlib
import time
import zlib

# Programs that nobody has compiled anew for so long may be of code that is gone.
_DAYS = 14


def program_folder(otherwise: pathlib.Path) -> pathlib.Path:
  """Returns the folder for this kind of CPU, in the user's cache; `otherwise` if there can be none.

  `PAXLIKE_TESTS_PROGRAMS` names another.
  """
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
  default = cache / "paxlike-tests" / f"programs-{_cpu()}"
  folder = pathlib.Path(os.environ.get("PAXLIKE_TESTS_PROGRAMS", default))
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError:
    return otherwise
  return folder if os.access(folder, os.W_OK) else otherwise


def remove_old(folder: pathlib.Path):
  """Removes the programs that are older than two weeks."""
  end = time.time() - 24 * 3600 * _DAYS
  for path in folder.iterdir():
    with contextlib.suppress(OSError):  # Another session removes it, too.
      if path.stat().st_mtime < end:
        path.unlink()


def _cpu() -> str:
  """Returns a name for the instructions that this CPU has: programs of others may use more."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith(("flags", "Features")):
        return f"{zlib.crc32(line.encode()):08x}"
  return os.uname().machine
