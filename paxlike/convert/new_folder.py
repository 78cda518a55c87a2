# SPDX-License-Identifier: Apache-2.0
"""A new local folder that appears as a whole, or not at all."""

import contextlib
import fcntl
import glob
import os
import pathlib
import re
import shutil
import socket
import time
from collections.abc import Iterator

from paxlike import file_io
from paxlike.errors import UserError

_LOCK, _CONTENT = "lock", "content"

_ABANDONED = re.compile(r"\.[0-9]+$")

_QUIET = 1.0  # Seconds after which the other writes of one that failed have ended.

_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def check_new(folder: pathlib.Path, *, flag: str):
  """Raises a UserError if `folder`, set by `flag`, is a link or a non-empty folder."""
  target = pathlib.Path(os.path.abspath(folder))
  if target.is_symlink():
    raise UserError(f"--{flag}={folder} is a link: name a new folder.")
  try:
    is_empty = os.path.isdir(target) and not os.listdir(target)
  except OSError as error:
    raise UserError(f"--{flag}={folder} cannot be written: {file_io.reason(error)}.") from error
  if os.path.lexists(target) and not is_empty:
    raise UserError(f"--{flag}={folder} already exists: name a new folder.")


@contextlib.contextmanager
def filling(folder: pathlib.Path, *, flag: str) -> Iterator[pathlib.Path]:
  """Context that yields a folder to fill, which atomically becomes `folder` at the end.

  It is filled in `.NAME.DIGITS` beside it, which is removed at the end, or by the next call for
  the same `folder` if the process was killed.

  Raises:
    UserError: `folder`, set by `flag`, is not empty or cannot be written.
  """
  check_new(folder, flag=flag)
  target = pathlib.Path(os.path.abspath(folder))
  missing = [parent for parent in target.parents if not os.path.lexists(parent)]
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
      _remove_abandoned(left)
    building = target.with_name(file_io.unique(target.name))
    with _locked(building):
      content = building / _CONTENT
      content.mkdir()
      yield content
      content.rename(target)
  except OSError as error:
    raise UserError(f"--{flag}={folder} cannot be written: {file_io.reason(error)}.") from error
  finally:
    for parent in missing:
      with contextlib.suppress(OSError):
        parent.rmdir()  # Only if empty.


def _host() -> set[str]:
  """Returns this machine's host name, and its boot id, which containers share."""
  with contextlib.suppress(OSError):
    return {socket.gethostname(), _BOOT.read_text().strip()}
  return {socket.gethostname()}


@contextlib.contextmanager
def _locked(building: pathlib.Path) -> Iterator[None]:
  """Context with a new folder and a lock in it, held while the process that fills it is alive.

  The system releases the lock however the process ends; a process id could have been reused. On a
  file system without locks, the folder is never considered abandoned.
  """
  lock, quiet = None, 0.0
  try:
    while lock is None:
      lock = _new_lock(building)
    quiet = _QUIET
    yield
    quiet = 0.0
  finally:
    if lock is not None:
      os.close(lock)
    _remove(building, quiet=quiet)


def _new_lock(building: pathlib.Path) -> int | None:
  """Creates a folder and locks it; None if another process meanwhile removed it as abandoned."""
  building.mkdir()
  try:
    lock = os.open(building / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      # Written after locking, so that whoever reads the names finds the lock held.
      os.write(lock, "\n".join(_host()).encode())
    if os.path.samestat(os.stat(building / _LOCK), os.fstat(lock)):
      return lock
  except FileNotFoundError:
    pass
  return None


def _remove_abandoned(building: pathlib.Path):
  """Removes the folder of a killed process of this machine, not one of other machines."""
  if not _ABANDONED.search(building.name) or building.is_symlink():
    return
  with contextlib.suppress(OSError, ValueError):
    inside = set(os.listdir(building))
    if not inside:
      building.rmdir()
    elif inside <= {_LOCK, _CONTENT} and _LOCK in inside:
      with open(building / _LOCK, "r+") as lock:
        names = set(lock.read().split())
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if names & _host():  # Locks may not work between machines.
          _remove(building)
        elif not names:  # Its process ended, or retries, before writing anything.
          os.unlink(building / _LOCK)
          building.rmdir()


def _remove(building: pathlib.Path, *, quiet: float = 0.0):
  """Removes a folder until nothing has created it anew for `quiet` seconds, for at most 10 s.

  TensorStore's other writes go on after one has failed, and create missing folders.
  """
  gone = began = time.monotonic()
  while (now := time.monotonic()) < began + 10:
    if os.path.lexists(building):
      shutil.rmtree(building, ignore_errors=True)
      gone = now
    elif now >= gone + quiet:
      return
    else:
      time.sleep(0.05)
