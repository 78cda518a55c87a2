# SPDX-License-Identifier: Apache-2.0
"""The folder of a run (`--job_log_dir`), local or on a bucket."""

import os
import tempfile

from etils import epath

from paxlike.errors import UserError


def create(path: str) -> epath.Path:
  """Returns the folder, made if missing, after trying to write in it.

  Raises:
    UserError: It cannot be made or written in; nothing is left behind.
  """
  folder = epath.Path(path if "://" in path else os.path.abspath(os.path.expanduser(path)))
  if "://" in path:
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ImportError, ValueError) as error:
      raise UserError(f"--job_log_dir={path} cannot be written: {error}.") from error
    return folder
  made = None
  for parent in reversed([folder, *folder.parents]):
    if not parent.exists():
      made = parent
      break
  try:
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    if made is not None and made.is_dir():
      os.removedirs(folder)
    reason = error.strerror or str(error)
    raise UserError(f"--job_log_dir={path} cannot be written: {reason}.") from None
  return folder


def write(path: epath.Path, text: str):
  """Writes a file so that a reader sees all of the old text or all of the new."""
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  temporary.write_text(text)
  temporary.replace(path)
