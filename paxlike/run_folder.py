# SPDX-License-Identifier: Apache-2.0
"""The folder of a run (`--job_log_dir`), local or on a bucket."""

import contextlib
import errno
import fcntl
import glob
import importlib.util
import io
import json
import os
import pathlib
import re
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import TextIO

from etils import epath

from paxlike.errors import UserError


def absolute(path: str | os.PathLike[str]) -> epath.Path:
  """Returns a path that means the same from every working directory; on a bucket it is as given."""
  text = os.fspath(path)
  return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


# Begins paths in the files of a run that mean its own folder, wherever that is moved.
OWN = "{run}/"


def with_own_paths(text: str, folder: str | os.PathLike[str]) -> str:
  """Returns the JSON of a file in `folder`, with the paths in it that begin with `OWN` resolved."""
  if OWN not in text:
    return text
  return text.replace(f'"{OWN}', json.dumps(f"{absolute(folder)}/")[:-1])


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is on an object store."""
  return "://" in os.fspath(path)


def failures() -> tuple[type[Exception], ...]:
  """Returns the errors by which reading and writing fail: also those of the store in use."""
  if "gcsfs" not in sys.modules:
    return (OSError,)
  import aiohttp
  import google.api_core.exceptions
  import google.auth.exceptions
  from gcsfs import retry

  return (
    OSError,
    retry.HttpError,
    retry.ChecksumError,
    aiohttp.ClientError,
    google.auth.exceptions.GoogleAuthError,
    google.api_core.exceptions.GoogleAPIError,
  )


#: What reading a damaged file of JSON raises: it is none, or holds values of other types.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def reason(error: BaseException) -> str:
  """Returns in one line what an error says."""
  text = getattr(error, "strerror", None) or str(error).strip() or repr(error)
  # Of a store's error 404, clients report nothing but the URL.
  found = "not found: " if isinstance(error, FileNotFoundError) and error.errno is None else ""
  return found + text.splitlines()[0].rstrip(".")[:600]


def advice(error: BaseException) -> str:
  """Returns what to do where a run could not write."""
  text = str(error).lower()
  full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
  if full or "no space left" in text or "quota exceeded" in text:
    return "Make room there or set another --job_log_dir; then give the same command again."
  return "Mend that or set another --job_log_dir; then give the same command again."


def beginning_with(folder: epath.Path, prefix: str) -> list[epath.Path]:
  """Returns what in a folder has names that begin so, sorted; nothing if there is no folder."""
  if is_remote(folder):
    return sorted(folder.glob(f"{prefix}*"))
  # `epath.Path.glob` would take the name of the folder itself for a pattern.
  try:
    return sorted(folder / name for name in os.listdir(folder) if name.startswith(prefix))
  except (FileNotFoundError, NotADirectoryError):
    return []


def check_name(path: str | os.PathLike[str], *, flag: str):
  """Raises a UserError if checkpoints in a folder, which `flag` named, could not be found again.

  Orbax takes the names of folders for patterns.
  """
  if signs := sorted(set(os.fspath(absolute(path))) & set("*?[")):
    raise UserError(
      f"--{flag}={path}: no checkpoint can be written in a folder with {' or '.join(signs)} in its"
      f" path, {absolute(path)}."
    )


def existing(path: str) -> epath.Path:
  """Returns the folder of a run that there is.

  Raises:
    UserError: There is none, or its store cannot be reached.
  """
  _check_store(path)
  folder = epath.Path(path)
  with _reaching(f"--job_log_dir={path} cannot be read"):
    found = folder.exists()
  if not found:
    raise UserError(f"--job_log_dir={path}: no such folder.")
  return folder


def _check_store(path: str):
  """Raises a UserError if a path is of no store that is known, or its client is not installed."""
  if path.startswith("gs://") and importlib.util.find_spec("gcsfs") is None:
    raise UserError(f"--job_log_dir={path}: gcsfs is missing: pip install 'paxlike[gcs]'.")
  try:
    epath.Path(path)
  except KeyError:
    raise UserError(f"--job_log_dir={path}: expected a local folder or gs://...") from None


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
  """Context of first asking a store. Whatever it raises becomes a UserError that begins so."""
  try:
    yield
  except (ImportError, NotImplementedError, ValueError, *failures()) as error:
    raise UserError(f"{what}: {reason(error)}.") from error


@contextlib.contextmanager
def entered(path: str) -> Iterator[epath.Path]:
  """Context with the folder of a run, made if missing, after trying to write in it.

  Folders that were made for it and are empty at the end are removed: a run that was refused leaves
  nothing.

  Raises:
    UserError: It cannot be made or written in.
  """
  made = _missing(path)
  try:
    yield create(path)
  finally:
    for parent in made:
      with contextlib.suppress(OSError):
        os.rmdir(parent)


def _missing(path: str) -> list[epath.Path]:
  """Returns the folder and those above it that are not there, the lowest first."""
  folder = absolute(path)
  if is_remote(path):
    return []
  return [parent for parent in (folder, *folder.parents) if not os.path.exists(parent)]


def create(path: str) -> epath.Path:
  """Returns the folder, made if missing, after trying to write in it.

  Raises:
    UserError: It cannot be made or written in. Folders that were made for it are removed.
  """
  _check_store(path)
  check_name(path, flag="job_log_dir")
  folder = absolute(path)
  if is_remote(path):
    # A store has no folders that could be made, and says only of an object whether it takes it.
    # A bucket in which the run may not delete is refused, and keeps the object.
    trial = folder / f".paxlike-{uuid.uuid4().hex}"
    with _reaching(f"--job_log_dir={path} cannot be written"):
      trial.write_bytes(b"trial")
      trial.unlink()
    return folder
  missing = _missing(path)
  try:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as trial:
      trial.write(b"trial")
  except OSError as error:
    for parent in missing:
      with contextlib.suppress(OSError):
        parent.rmdir()
    raise UserError(f"--job_log_dir={path} cannot be written: {reason(error)}.") from None
  return folder


@contextlib.contextmanager
def reading(path: epath.PathLike) -> Iterator[None]:
  """Context of reading what a run has written.

  Raises:
    UserError: It failed; the store may be out of reach.
  """
  try:
    yield
  except failures() as error:
    raise UserError(f"{path} cannot be read: {reason(error)}.") from error


@contextlib.contextmanager
def writing(folder: epath.Path) -> Iterator[None]:
  """Context of writing in the folder of a run that goes on.

  Raises:
    UserError: It failed; the disk may be full, or the store out of reach.
  """
  try:
    yield
  except failures() as error:
    intact = " Its checkpoints are intact." if has_checkpoints(folder / "checkpoints") else ""
    raise UserError(
      f"{folder} cannot be written: {reason(error)}.{intact} {advice(error)}"
    ) from error


def has_checkpoints(directory: epath.Path) -> bool:
  """Returns whether names in a local directory are those of whole checkpoints.

  A store is not asked: where something has just failed, it may be out of reach for minutes.
  """
  with contextlib.suppress(*failures()):
    if not is_remote(directory):
      return any("." not in path.name for path in beginning_with(directory, "checkpoint_"))
  return False


def check_ends(path: epath.PathLike):
  """Raises OSError if a path is a pipe or a device, which might be read for ever."""
  local = os.fspath(path)
  if os.path.exists(local) and not os.path.isfile(local) and not os.path.isdir(local):
    name = os.path.basename(local)
    raise OSError(errno.EINVAL, f"{name} is a pipe or a device, no file", local)


def check_file(path: epath.PathLike):
  """Does as `check_ends`, and raises OSError for a folder too."""
  check_ends(path)
  if os.path.isdir(local := os.fspath(path)):
    raise IsADirectoryError(errno.EISDIR, f"{os.path.basename(local)} is a folder, no file", local)


def read_bytes(path: epath.PathLike) -> bytes:
  """Returns what a file of a run holds.

  Raises:
    OSError: It cannot be read; a pipe or a device is not waited for.
  """
  check_file(path)
  return epath.Path(path).read_bytes()


def unique(name: str) -> str:
  """Returns `.NAME.DIGITS` for a file or folder that becomes NAME: no other process takes that.

  The digits are drawn: processes of several machines, or containers, may have the same number.
  """
  return f".{name}.{uuid.uuid4().int % 10**12}"


def write(path: epath.Path, text: str):
  """Writes a file so that a reader sees all of the old text or all of the new.

  Raises:
    OSError: It failed; the old text is still there.
  """
  if is_remote(path):
    path.write_bytes(text.encode())  # Stores replace an object as a whole.
    return
  temporary = path.with_name(unique(path.name))
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[TextIO]:
  """Context with a file to write to, which becomes `path` at its end; an error leaves the old one.

  Raises:
    OSError: It failed; what was there is still there.
  """
  if is_remote(path):
    text = io.StringIO()
    yield text
    path.write_bytes(text.getvalue().encode())
    return
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(unique(path.name))
  try:
    with open(temporary, "w") as file:
      yield file
    temporary.replace(path)
  finally:
    temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
      os.rmdir(path.parent)  # If it was made for nothing.


def check_new(folder: pathlib.Path, *, flag: str):
  """Raises a UserError if `folder`, which `flag` named, is a link or holds something already."""
  target = pathlib.Path(os.path.abspath(folder))
  if target.is_symlink():
    raise UserError(f"--{flag}={folder} is a link: name a new folder.")
  try:
    is_empty = os.path.isdir(target) and not os.listdir(target)
  except OSError as error:
    raise UserError(f"--{flag}={folder} cannot be written: {reason(error)}.") from error
  if os.path.lexists(target) and not is_empty:
    raise UserError(f"--{flag}={folder} is there already: name a new folder.")


@contextlib.contextmanager
def built(folder: pathlib.Path, *, flag: str) -> Iterator[pathlib.Path]:
  """Context that gives a folder to fill, which becomes `folder` at its end: whole, or not at all.

  It is filled in `.NAME.DIGITS` beside it, which is removed in the end, or by the next call for
  the same `folder` if its process was killed.

  Raises:
    UserError: `folder` holds something already, or cannot be written; `flag` named it.
  """
  check_new(folder, flag=flag)
  target = pathlib.Path(os.path.abspath(folder))
  missing = [parent for parent in target.parents if not os.path.lexists(parent)]
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{glob.escape(target.name)}.*"):
      _remove_abandoned(left)
    building = target.with_name(unique(target.name))
    with _locked(building):
      content = building / _CONTENT
      content.mkdir()
      yield content
      content.rename(target)
  except OSError as error:
    raise UserError(f"--{flag}={folder} cannot be written: {reason(error)}.") from error
  finally:
    for parent in missing:
      with contextlib.suppress(OSError):
        parent.rmdir()  # Unless something is in it.


_LOCK, _CONTENT = "lock", "content"
_ABANDONED = re.compile(r"\.[0-9]+$")
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


def _host() -> set[str]:
  """Returns names of this machine: its own, and its running system's, which containers share."""
  with contextlib.suppress(OSError):
    return {socket.gethostname(), _BOOT.read_text().strip()}
  return {socket.gethostname()}


@contextlib.contextmanager
def _locked(building: pathlib.Path) -> Iterator[None]:
  """Context that has a folder of a new name, whose lock says that the process that fills it lives.

  The system frees the lock when the process ends, however that does; a process number alone could
  be that of another process by then. Where the file system has no locks, the folder is never taken
  for abandoned.
  """
  lock = None
  try:
    while lock is None:
      lock = _new_lock(building)
    yield
  finally:
    if lock is not None:
      os.close(lock)
    _remove(building)


def _new_lock(building: pathlib.Path) -> int | None:
  """Makes a folder and takes its lock; None if another took it for abandoned in between."""
  building.mkdir()
  try:
    lock = os.open(building / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      os.write(lock, "\n".join(_host()).encode())  # Locked first: who reads it tries the lock.
    if os.path.samestat(os.stat(building / _LOCK), os.fstat(lock)):
      return lock
  except FileNotFoundError:
    pass
  return None


def _remove_abandoned(building: pathlib.Path):
  """Removes what a killed process of this machine left; leaves what may be another's."""
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
        if names & _host():  # Other machines may not see our locks, nor we theirs.
          _remove(building)
        elif not names:  # Its process ended, or makes another, before it wrote anything.
          os.unlink(building / _LOCK)
          building.rmdir()


def _remove(building: pathlib.Path):
  """Removes a folder, in which threads of a write that was given up may still make files."""
  for _ in range(20):
    shutil.rmtree(building, ignore_errors=True)
    if not os.path.lexists(building):
      return
    time.sleep(0.05)
