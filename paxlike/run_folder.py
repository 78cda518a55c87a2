# SPDX-License-Identifier: Apache-2.0
"""The folder of a run (`--job_log_dir`), local or on a bucket: atomic writing, paths, errors."""

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

MAX_BYTES = 64_000_000  #: Default size limit of a run's files; records of metrics have none.


def absolute(path: str | os.PathLike[str]) -> epath.Path:
  """Returns an absolute path; a path on a bucket is returned as given."""
  text = os.fspath(path)
  return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


# Prefix of paths relative to the run's folder, in files of the run.
OWN = "{run}/"


def with_own_paths(text: str, folder: str | os.PathLike[str]) -> str:
  """Returns the JSON of a file in `folder` with its paths that begin with `OWN` resolved."""
  if OWN not in text:
    return text
  return text.replace(f'"{OWN}', json.dumps(f"{absolute(folder)}/")[:-1])


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Returns whether a path is on an object store."""
  return "://" in os.fspath(path)


def failures() -> tuple[type[Exception], ...]:
  """Returns the exceptions of failed reads and writes, including those of the store in use."""
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


#: Exceptions of reading a damaged JSON file: invalid JSON, or values of other types.
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def reason(error: BaseException) -> str:
  """Returns an error's message in one line."""
  text = getattr(error, "strerror", None) or str(error).strip() or repr(error)
  # For a store's error 404, clients report only the URL.
  found = "not found: " if isinstance(error, FileNotFoundError) and error.errno is None else ""
  return found + text.splitlines()[0].rstrip(".")[:600]


def advice(error: BaseException) -> str:
  """Returns what the user can do after a failed write."""
  text = str(error).lower()
  full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
  if full or "no space left" in text or "quota exceeded" in text:
    return "Free space there or set another --job_log_dir, and run the same command again."
  return "Fix that or set another --job_log_dir, and run the same command again."


def beginning_with(folder: epath.Path, prefix: str) -> list[epath.Path]:
  """Returns the paths in a folder whose names begin with `prefix`, sorted; [] without a folder."""
  if is_remote(folder):
    return sorted(folder.glob(f"{prefix}*"))
  # `epath.Path.glob` would interpret the folder's own name as a pattern.
  try:
    return sorted(folder / name for name in os.listdir(folder) if name.startswith(prefix))
  except (FileNotFoundError, NotADirectoryError):
    return []


def check_name(path: str | os.PathLike[str], *, flag: str):
  """Raises a UserError if a path, set by `flag`, has glob characters, which Orbax interprets."""
  if signs := sorted(set(os.fspath(absolute(path))) & set("*?[")):
    raise UserError(
      f"--{flag}={path}: checkpoints cannot be written in a folder with {' or '.join(signs)} in its"
      f" path, {absolute(path)}."
    )


def existing(path: str) -> epath.Path:
  """Returns the folder of an existing run.

  Raises:
    UserError: It does not exist, or its store cannot be reached.
  """
  _check_store(path)
  folder = epath.Path(path)
  with _reaching(f"--job_log_dir={path} cannot be read"):
    found = folder.exists()
  if not found:
    raise UserError(f"--job_log_dir={path}: no such folder.")
  return folder


def _check_store(path: str):
  """Raises a UserError if a path's store is unknown or its client is not installed."""
  if path.startswith("gs://") and importlib.util.find_spec("gcsfs") is None:
    raise UserError(f"--job_log_dir={path}: gcsfs is missing: pip install 'paxlike[gcs]'.")
  try:
    epath.Path(path)
  except KeyError:
    raise UserError(f"--job_log_dir={path}: expected a local folder or gs://...") from None


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
  """Context of the first access to a store; errors become a UserError that begins with `what`."""
  try:
    yield
  except (ImportError, NotImplementedError, ValueError, *failures()) as error:
    raise UserError(f"{what}: {reason(error)}.") from error


@contextlib.contextmanager
def entered(path: str) -> Iterator[epath.Path]:
  """Context with the folder of a run, created if missing and checked to be writable.

  At the end, created folders that are empty are removed: a refused run leaves nothing behind.

  Raises:
    UserError: It cannot be created or written.
  """
  made = _missing(path)
  try:
    yield create(path)
  finally:
    for parent in made:
      with contextlib.suppress(OSError):
        os.rmdir(parent)


def _missing(path: str) -> list[epath.Path]:
  """Returns the folder and its parents that do not exist, the deepest first."""
  folder = absolute(path)
  if is_remote(path):
    return []
  return [parent for parent in (folder, *folder.parents) if not os.path.exists(parent)]


def create(path: str) -> epath.Path:
  """Returns the folder, created if missing and checked to be writable.

  Raises:
    UserError: It cannot be created or written; created folders are removed again.
  """
  _check_store(path)
  check_name(path, flag="job_log_dir")
  folder = absolute(path)
  if is_remote(path):
    # A store has no folders, so write and delete a trial object. A bucket without permission to
    # delete is refused, and keeps the object.
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
  """Context of reading a run's files.

  Raises:
    UserError: It failed, for example because the store is unreachable.
  """
  try:
    yield
  except failures() as error:
    raise UserError(f"{path} cannot be read: {reason(error)}.") from error


@contextlib.contextmanager
def writing(folder: epath.Path) -> Iterator[None]:
  """Context of writing in the folder of a run in progress.

  Raises:
    UserError: It failed, for example because the disk is full or the store unreachable.
  """
  try:
    yield
  except failures() as error:
    intact = " Its checkpoints are intact." if has_checkpoints(folder / "checkpoints") else ""
    raise UserError(
      f"{folder} cannot be written: {reason(error)}.{intact} {advice(error)}"
    ) from error


def has_checkpoints(directory: epath.Path) -> bool:
  """Returns whether a local directory has committed checkpoints, by their names.

  False for a store: after a failure, asking it may take minutes.
  """
  with contextlib.suppress(*failures()):
    if not is_remote(directory):
      return any("." not in path.name for path in beginning_with(directory, "checkpoint_"))
  return False


def check_ends(path: epath.PathLike):
  """Raises OSError if a path is a pipe or a device, where a read may never end."""
  local = os.fspath(path)
  if os.path.exists(local) and not os.path.isfile(local) and not os.path.isdir(local):
    name = os.path.basename(local)
    raise OSError(errno.EINVAL, f"{name} is a pipe or a device, not a file", local)


def check_file(path: epath.PathLike):
  """Same as `check_ends`, and raises OSError for a folder too."""
  check_ends(path)
  if os.path.isdir(local := os.fspath(path)):
    name = os.path.basename(local)
    raise IsADirectoryError(errno.EISDIR, f"{name} is a folder, not a file", local)


def read_bytes(path: epath.PathLike, *, limit: int | None = MAX_BYTES) -> bytes:
  """Returns the content of a run's file of at most `limit` bytes.

  Raises:
    OSError: It cannot be read, is larger, or is a pipe or a device.
  """
  check_file(path)
  file = epath.Path(path)
  if limit is not None and (size := file.stat().length) > limit:
    message = f"{file.name} has {size:,} bytes; the limit for such a file is {limit:,}"
    raise OSError(errno.EFBIG, message, os.fspath(path))
  return file.read_bytes()


def unique(name: str) -> str:
  """Returns `.NAME.DIGITS`, a unique temporary name of a file or folder that becomes NAME.

  The digits are random: process ids are not unique across machines or containers.
  """
  return f".{name}.{uuid.uuid4().int % 10**12}"


def write(path: epath.Path, text: str | bytes):
  """Writes a file atomically: a reader sees either the old or the new content.

  Raises:
    OSError: It failed; the old content is unchanged.
  """
  content = text.encode() if isinstance(text, str) else text
  if is_remote(path):
    path.write_bytes(content)  # Stores replace an object as a whole.
    return
  temporary = path.with_name(unique(path.name))
  try:
    temporary.write_bytes(content)
    temporary.replace(path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[TextIO]:
  """Context with a file to write, which replaces `path` atomically at the end.

  Raises:
    OSError: It failed; `path` is unchanged, as after any exception in the context.
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
      os.rmdir(path.parent)  # If it is empty.


def check_new(folder: pathlib.Path, *, flag: str):
  """Raises a UserError if `folder`, set by `flag`, is a link or a non-empty folder."""
  target = pathlib.Path(os.path.abspath(folder))
  if target.is_symlink():
    raise UserError(f"--{flag}={folder} is a link: name a new folder.")
  try:
    is_empty = os.path.isdir(target) and not os.listdir(target)
  except OSError as error:
    raise UserError(f"--{flag}={folder} cannot be written: {reason(error)}.") from error
  if os.path.lexists(target) and not is_empty:
    raise UserError(f"--{flag}={folder} already exists: name a new folder.")


@contextlib.contextmanager
def built(folder: pathlib.Path, *, flag: str) -> Iterator[pathlib.Path]:
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
        parent.rmdir()  # Only if empty.


_LOCK, _CONTENT = "lock", "content"
_ABANDONED = re.compile(r"\.[0-9]+$")
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")


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
  """Creates a folder and locks it; None if another process meanwhile removed it as abandoned."""
  building.mkdir()
  try:
    lock = os.open(building / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      os.write(lock, "\n".join(_host()).encode())  # After locking: readers then try the lock.
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


def _remove(building: pathlib.Path):
  """Removes a folder; retries, since threads of an aborted write may still create files in it."""
  for _ in range(20):
    shutil.rmtree(building, ignore_errors=True)
    if not os.path.lexists(building):
      return
    time.sleep(0.05)
