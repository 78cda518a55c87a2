# SPDX-License-Identifier: Apache-2.0
"""The folder of a run (`--job_log_dir`), local or on a bucket: opening, reading, writing it."""

import contextlib
import errno
import importlib.util
import json
import os
import tempfile
import uuid
from collections.abc import Iterator

from etils import epath

from paxlike import file_io
from paxlike.errors import UserError

# Names that a run writes as files, and as folders.
_FILES = (
  "config.json",
  "config.txt",
  "experiment.json",
  "status.json",
  "metrics.jsonl",
  "trackers.json",
)
_FOLDERS = ("checkpoints", "summaries", "stacks", "eval_out", "goodput", "profile")
# Prefix of paths relative to the run's folder, in files of the run.
OWN = "{run}/"


def with_own_paths(text: str, folder: str | os.PathLike[str]) -> str:
  """Returns the JSON of a file in `folder` with its paths that begin with `OWN` resolved."""
  if OWN not in text:
    return text
  return text.replace(f'"{OWN}', json.dumps(f"{file_io.absolute(folder)}/")[:-1])


def advice(error: BaseException) -> str:
  """Returns what the user can do after a failed write."""
  text = str(error).lower()
  full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
  if full or "no space left" in text or "quota exceeded" in text:
    return "Free space there or set another --job_log_dir, and run the same command again."
  return "Fix that or set another --job_log_dir, and run the same command again."


def check_name(path: str | os.PathLike[str], *, flag: str):
  """Raises a UserError if a path, set by `flag`, has glob characters, which Orbax interprets."""
  if signs := sorted(set(os.fspath(file_io.absolute(path))) & set("*?[")):
    raise UserError(
      f"--{flag}={path}: checkpoints cannot be written in a folder with {' or '.join(signs)} in its"
      f" path, {file_io.absolute(path)}."
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
  """Raises a UserError if a path's store is unknown, names no bucket, or lacks its client."""
  if path.startswith("gs://") and importlib.util.find_spec("gcsfs") is None:
    raise UserError(f"--job_log_dir={path}: gcsfs is missing: pip install 'paxlike[gcs]'.")
  try:
    file_io.absolute(path)
  except UserError as error:
    raise UserError(f"--job_log_dir={error}") from None


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
  """Context of the first access to a store; errors become a UserError that begins with `what`."""
  try:
    yield
  except (ImportError, NotImplementedError, ValueError, *file_io.failures()) as error:
    raise UserError(f"{what}: {file_io.reason(error)}.") from error


@contextlib.contextmanager
def entered(path: str) -> Iterator[epath.Path]:
  """Context with the folder of a run, created if missing and checked to be writable.

  At the end, created folders that are empty are removed: a refused run leaves nothing behind.

  Raises:
    UserError: It cannot be created or written.
  """
  _check_store(path)
  made = _missing(path)
  try:
    yield create(path)
  finally:
    for parent in made:
      with contextlib.suppress(OSError):
        os.rmdir(parent)


def _missing(path: str) -> list[epath.Path]:
  """Returns the folder and its parents that do not exist, the deepest first."""
  folder = file_io.absolute(path)
  if file_io.is_remote(path):
    return []
  return [parent for parent in (folder, *folder.parents) if not os.path.exists(parent)]


def create(path: str) -> epath.Path:
  """Returns the folder, created if missing and checked to be writable.

  Raises:
    UserError: It cannot be created or written; created folders are removed again.
  """
  _check_store(path)
  check_name(path, flag="job_log_dir")
  folder = file_io.absolute(path)
  if file_io.is_remote(path):
    # A store has no folders, so write and delete a trial object. A bucket without permission to
    # delete is refused, and keeps the object.
    trial = folder / f".paxlike-{uuid.uuid4().hex}"
    with _reaching(f"--job_log_dir={path} cannot be written"):
      trial.write_bytes(b"trial")
      trial.unlink()
    return folder
  _check_kinds(path, folder)
  missing = _missing(path)
  try:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as trial:
      trial.write(b"trial")
  except OSError as error:
    for parent in missing:
      with contextlib.suppress(OSError):
        parent.rmdir()
    raise UserError(f"--job_log_dir={path} cannot be written: {file_io.reason(error)}.") from None
  return folder


def _check_kinds(path: str, folder: epath.Path):
  """Raises a UserError if a folder, pipe or device is where a run writes a file, or the reverse."""
  kinds = dict.fromkeys(_FILES, ("file", os.path.isfile))
  kinds |= dict.fromkeys(_FOLDERS, ("folder", os.path.isdir))
  for name, (kind, is_one) in kinds.items():
    if os.path.lexists(folder / name) and not is_one(folder / name):
      raise UserError(f"--job_log_dir={path}: {name} in it is no {kind}: move it away.")


@contextlib.contextmanager
def reading(path: epath.PathLike) -> Iterator[None]:
  """Context of reading a run's files.

  Raises:
    UserError: It failed, for example because the store is unreachable.
  """
  try:
    yield
  except file_io.failures() as error:
    raise UserError(f"{path} cannot be read: {file_io.reason(error)}.") from error


@contextlib.contextmanager
def writing(folder: epath.Path) -> Iterator[None]:
  """Context of writing in the folder of a run in progress.

  Raises:
    UserError: It failed, for example because the disk is full or the store unreachable.
  """
  try:
    yield
  except file_io.failures() as error:
    intact = " Its checkpoints are intact." if has_checkpoints(folder / "checkpoints") else ""
    raise UserError(
      f"{folder} cannot be written: {file_io.reason(error, within=folder)}.{intact} {advice(error)}"
    ) from error


def has_checkpoints(directory: epath.Path) -> bool:
  """Returns whether a local directory has committed checkpoints, by their names.

  False for a store: after a failure, asking it may take minutes.
  """
  with contextlib.suppress(*file_io.failures()):
    if not file_io.is_remote(directory):
      return any("." not in path.name for path in file_io.beginning_with(directory, "checkpoint_"))
  return False
