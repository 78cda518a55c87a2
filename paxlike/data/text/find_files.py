# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a user's path: a file, a folder or a glob."""

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence

from paxlike import untrusted_files
from paxlike.errors import UserError


def find(
  path: str | None, suffixes: tuple[str, ...], *, knob: str, any_single: bool = False
) -> list[str]:
  """Returns the files, sorted; each ends with one of `suffixes`.

  A folder is searched recursively for such files. With `any_single`, a path of a single file may
  have any suffix.

  Raises:
    UserError: There is no file, or one has another suffix or cannot be read; it names `knob`.
  """
  if not path:
    raise UserError(f"{knob} is not set: give --fdl.{knob}=PATH (a file, a folder or a glob).")
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
      kind = untrusted_files.kind(os.stat(where))
      raise UserError(f"{knob}={path} is {kind}, not a regular file: copy its content into one.")
    what = "holds no" if os.path.isdir(where) else "matches no"
    raise UserError(f"{knob}={path} {what} file with a suffix of {', '.join(suffixes)}.")
  for name in files:
    if not name.endswith(suffixes):
      raise UserError(f"{knob}: the suffix of {name} is not one of {', '.join(suffixes)}.")
    if not os.access(name, os.R_OK):
      raise UserError(f"{knob}: {name} cannot be read.")
  return files


def _below(folder: str) -> Iterator[str]:
  """Yields the files of a folder and its sub-folders, each folder once: links may form a cycle."""
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
  """Returns (path, bytes, modification time) of each file, as a key for caches.

  Raises:
    UserError: A file is missing.
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
