# SPDX-License-Identifier: Apache-2.0
"""The folder of a run (`--job_log_dir`), local or on a bucket."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator

from etils import epath

from paxlike.errors import UserError


def absolute(path: str | os.PathLike[str]) -> epath.Path:
  """Returns a path that means the same from every working directory; on a bucket it is as given."""
  text = os.fspath(path)
  return epath.Path(text if "://" in text else os.path.abspath(os.path.expanduser(text)))


def create(path: str) -> epath.Path:
  """Returns the folder, made if missing, after trying to write in it.

  Raises:
    UserError: It cannot be made or written in; nothing is left behind.
  """
  folder = absolute(path)
  if "://" in path:
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ImportError, ValueError) as error:
      raise UserError(f"--job_log_dir={path} cannot be written: {error}.") from error
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
    reason = error.strerror or str(error)
    raise UserError(f"--job_log_dir={path} cannot be written: {reason}.") from None
  return folder


@contextlib.contextmanager
def writing(folder: epath.Path) -> Iterator[None]:
  """Context of writing in the folder of a run that goes on.

  Raises:
    UserError: It failed; the disk may be full.
  """
  try:
    yield
  except OSError as error:
    raise UserError(
      f"{folder} cannot be written: {error.strerror or error}. Its checkpoints are intact. Make"
      " room there or set another --job_log_dir; the same command resumes the run."
    ) from error


def write(path: epath.Path, text: str):
  """Writes a file so that a reader sees all of the old text or all of the new.

  Raises:
    OSError: It failed; the old text is still there.
  """
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
    reason = error.strerror or error
    raise UserError(f"--{flag}={folder} cannot be written: {reason}.") from error
  finally:
    shutil.rmtree(building, ignore_errors=True)
