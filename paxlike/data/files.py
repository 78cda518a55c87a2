# SPDX-License-Identifier: Apache-2.0
"""The files that a path of the user means: one, all of a folder, or those of a glob."""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence

from paxlike import input_files
from paxlike.errors import UserError


def find(
  path: str | None, suffixes: tuple[str, ...], *, knob: str, any_single: bool = False
) -> list[str]:
  """Returns the files, sorted; of a folder those with one of `suffixes`, which all must have.

  With `any_single`, a file that is named itself may have any other suffix.

  Raises:
    UserError: There is none, one is of another kind or cannot be read; it names `knob`.
  """
  if not path:
    raise UserError(f"{knob} is not set: give --fdl.{knob}=, a file, a folder or a glob.")
  where = os.path.expanduser(path)
  if os.path.isdir(where):
    files = [name for name in _below(where) if name.endswith(suffixes)]
  else:
    is_single = os.path.isfile(where)
    files = [where] if is_single else glob.glob(where, recursive=True)
    suffixes = ("",) if is_single and any_single else suffixes
  files = sorted(name for name in files if os.path.isfile(name))
  if not files:
    if os.path.exists(where) and not os.path.isdir(where):
      kind = input_files.kind(os.stat(where))
      raise UserError(f"{knob}={path} is {kind}, no file: write what it gives into one.")
    what = "holds no" if os.path.isdir(where) else "matches no"
    raise UserError(f"{knob}={path} {what} file; wanted: {', '.join(suffixes)}.")
  for name in files:
    if not name.endswith(suffixes):
      raise UserError(f"{knob}: {name} is none of {', '.join(suffixes)}.")
    if not os.access(name, os.R_OK):
      raise UserError(f"{knob}: {name} cannot be read.")
  return files


def _below(folder: str) -> Iterator[str]:
  """Yields all that is in a folder and its sub-folders, each once: links may lead round."""
  seen: set[tuple[int, int]] = set()
  for path, folders, names in os.walk(folder, followlinks=True):
    found = os.stat(path)
    if (found.st_dev, found.st_ino) in seen:
      folders.clear()
      continue
    seen.add((found.st_dev, found.st_ino))
    folders[:] = sorted(name for name in folders if not name.startswith("."))
    yield from (os.path.join(path, name) for name in names if not name.startswith("."))


def stamps(files: Sequence[str], *, knob: str) -> list[tuple[str, int, int]]:
  """Returns (path, bytes, time of change) of each file, by which its content is known.

  Raises:
    UserError: One is gone.
  """
  try:
    stats = [(name, os.stat(name)) for name in map(os.path.abspath, files)]
  except OSError as error:
    raise UserError(f"{knob}: {error.filename} cannot be read: {error.strerror}.") from error
  return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def sha256(path: str | os.PathLike[str]) -> str:
  """Returns the hash of a file's content."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()
