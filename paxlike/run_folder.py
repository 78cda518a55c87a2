# SPDX-License-Identifier: Apache-2.0
"""The folder of a run (`--job_log_dir`), local or on a bucket."""

import contextlib
import errno
import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator

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


def reason(error: BaseException) -> str:
  """Returns in one line what an error says."""
  text = getattr(error, "strerror", None) or str(error).strip() or repr(error)
  # Of a store's error 404, clients tell nothing but the URL.
  found = "not found: " if isinstance(error, FileNotFoundError) and error.errno is None else ""
  return found + text.splitlines()[0].rstrip(".")[:600]


def advice(error: BaseException) -> str:
  """Returns what to do where a run could not write."""
  text = str(error).lower()
  full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
  if full or "no space left" in text or "quota exceeded" in text:
    return "Make room there or set another --job_log_dir; the same command resumes the run."
  return "Mend that or set another --job_log_dir; the same command resumes the run."


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


def create(path: str) -> epath.Path:
  """Returns the folder, made if missing, after trying to write in it.

  Raises:
    UserError: It cannot be made or written in. Folders that were made for it are removed.
  """
  _check_store(path)
  folder = absolute(path)
  if is_remote(path):
    # A store has no folders that could be made, and says only of an object whether it takes it.
    # A bucket in which the run may not delete is refused, and keeps the object.
    trial = folder / f".paxlike-{uuid.uuid4().hex}"
    with _reaching(f"--job_log_dir={path} cannot be written"):
      trial.write_bytes(b"")
      trial.unlink()
    return folder
  missing = [parent for parent in (folder, *folder.parents) if not os.path.exists(parent)]
  try:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
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
    raise UserError(
      f"{folder} cannot be written: {reason(error)}. Its checkpoints are intact. {advice(error)}"
    ) from error


def write(path: epath.Path, text: str):
  """Writes a file so that a reader sees all of the old text or all of the new.

  Raises:
    OSError: It failed; the old text is still there.
  """
  if is_remote(path):
    path.write_bytes(text.encode())  # Stores replace an object as a whole.
    return
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    temporary.write_text(text)
    temporary.replace(path)
  except OSError:
    temporary.unlink(missing_ok=True)
    raise


@contextlib.contextmanager
def built(folder: pathlib.Path, *, flag: str) -> Iterator[pathlib.Path]:
  """Context that gives a folder to fill, which becomes `folder` at its end: whole, or not at all.

  Raises:
    UserError: `folder` holds something already, or cannot be written; `flag` named it.
  """
  if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
    raise UserError(f"--{flag}={folder} is there already: name a new folder.")
  building = folder.with_name(f".{folder.name}.{os.getpid()}")
  try:
    building.mkdir(parents=True)
    yield building
    building.rename(folder)
  except OSError as error:
    raise UserError(f"--{flag}={folder} cannot be written: {reason(error)}.") from error
  finally:
    shutil.rmtree(building, ignore_errors=True)
