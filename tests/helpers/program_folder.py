# SPDX-License-Identifier: Apache-2.0
"""The folder of executables, which the workers and later sessions of tests share."""

import contextlib
import os
import pathlib
import time
import zlib

#: The environment variable for the folder.
FOLDER = "PAXLIKE_TESTS_PROGRAMS"
# Executables are removed so many days after they were written.
_DAYS = 14


def program_folder(otherwise: pathlib.Path) -> pathlib.Path:
  """Returns the folder for this kind of CPU, in the user's cache; `otherwise` if none can be used.

  `PAXLIKE_TESTS_PROGRAMS` names another.
  """
  try:
    folder = pathlib.Path(os.environ.get(FOLDER) or _default()).absolute()
    folder.mkdir(parents=True, exist_ok=True)
  except (OSError, RuntimeError):  # Such as a user without a home.
    folder = otherwise
  if not os.access(folder, os.W_OK):
    folder = otherwise
  folder.mkdir(parents=True, exist_ok=True)
  return folder


def remove_old(folder: pathlib.Path):
  """Removes the executables that were written more than two weeks ago."""
  end = time.time() - 24 * 3600 * _DAYS
  for path in folder.glob("*-cache"):
    with contextlib.suppress(OSError):  # Another session may have removed it.
      if path.stat().st_mtime < end:
        path.unlink()


def _default() -> pathlib.Path:
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
  return cache / "paxlike-tests" / f"programs-{_cpu()}"


def _cpu() -> str:
  """Returns a name for the instructions that this CPU has: executables of others may use more."""
  with contextlib.suppress(OSError):
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
      if line.startswith(("flags", "Features")):
        return f"{zlib.crc32(line.encode()):08x}"
  return os.uname().machine
