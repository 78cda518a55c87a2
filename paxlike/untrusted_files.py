# SPDX-License-Identifier: Apache-2.0
"""Safe reading of untrusted files: only regular files, of bounded size, within their folder.

A pipe, device or socket in place of a file could block or never end, a link or name could lead to
the user's private files, and a small file could expand beyond memory.
"""

import collections
import contextlib
import json
import math
import os
import pathlib
import stat
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from paxlike.errors import UserError

JSON_BYTES = 64_000_000  # Default limit of JSON files: an index of 500,000 tensors.
BOM = "\ufeff"  # The byte order mark that begins some UTF-8 files.
_MAX_CONTAINERS = 2_000_000  # Lists and mappings in JSON; each takes at least 60 bytes of memory.
_KINDS = {
  stat.S_IFDIR: "a folder",
  stat.S_IFIFO: "a pipe",
  stat.S_IFSOCK: "a socket",
  stat.S_IFCHR: "a device",
  stat.S_IFBLK: "a device",
}
# Prefixes of repositories in the cache of huggingface_hub; their files are links to blobs/.
_CACHED = ("models--", "datasets--")


class Identity(NamedTuple):
  """Identifies a file, to detect that it was replaced or changed."""

  device: int
  inode: int
  size: int
  changed_ns: int


@contextlib.contextmanager
def opened(path: pathlib.Path, *, folder: pathlib.Path | None = None) -> Iterator[BinaryIO]:
  """Context that yields a regular file, open for reading.

  Args:
    path: The file, or a link to it.
    folder: The folder that must contain the file with all links resolved; a file in the same
      huggingface_hub cache is also allowed. None: anywhere, because the user named the file.

  Raises:
    UserError: There is no such file, it is not a regular file, it is outside of the folder, or
      reading fails.
  """
  try:
    # Checked before opening, because opening a device may have an effect, and again afterwards,
    # because the file may have been replaced meanwhile.
    _refuse_other_kinds(path, os.stat(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
      _refuse_other_kinds(path, os.fstat(descriptor))
      if folder is not None:
        _refuse_outside(path, folder, descriptor)
      yield file
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
  except ValueError as error:
    if "null byte" not in str(error):
      raise
    raise UserError(f"{str(path)!r} is not a valid file name.") from None


def check(path: pathlib.Path, *, folder: pathlib.Path | None = None, limit: int | None = None):
  """Refuses what `opened` refuses, and files of more than `limit` bytes."""
  with opened(path, folder=folder) as file:
    _refuse_larger(path, os.fstat(file.fileno()).st_size, limit)


def identity(file: BinaryIO) -> Identity:
  """Returns the identity of an open file."""
  found = os.fstat(file.fileno())
  return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def kind(found: os.stat_result) -> str:
  """Returns the kind of something that is not a regular file."""
  return _KINDS.get(stat.S_IFMT(found.st_mode), "of another kind")


def is_there(path: pathlib.Path) -> bool:
  """Returns whether a path exists, even as a broken link."""
  return os.path.lexists(path)


def read(path: pathlib.Path, *, limit: int, folder: pathlib.Path | None = None) -> bytes:
  """Returns the content of a file of at most `limit` bytes; arguments and errors of `opened`."""
  with opened(path, folder=folder) as file:
    _refuse_larger(path, os.fstat(file.fileno()).st_size, limit)
    content = file.read(limit + 1)  # It may have grown.
    _refuse_larger(path, len(content), limit)
    return content


def read_text(path: pathlib.Path, *, limit: int, folder: pathlib.Path | None = None) -> str:
  """Returns the text of a UTF-8 file; arguments and errors of `read`."""
  try:
    return read(path, limit=limit, folder=folder).decode("utf-8")
  except UnicodeDecodeError as error:
    raise UserError(f"{path} is not UTF-8 text: {error.reason} at {error.start}.") from None


def copy(path: pathlib.Path, to: pathlib.Path, *, limit: int, folder: pathlib.Path | None):
  """Copies a file of at most `limit` bytes; arguments and errors of `opened`.

  Raises:
    OSError: `to` cannot be written.
  """
  content = read(path, limit=limit, folder=folder)
  to.write_bytes(content)


def read_json(
  path: pathlib.Path, *, limit: int = JSON_BYTES, folder: pathlib.Path | None = None
) -> dict[str, Any]:
  """Returns the mapping in a JSON file.

  Raises:
    UserError: It is not a mapping; or as `opened` and `parse_json`.
  """
  value = parse_json(read(path, limit=limit, folder=folder), place=str(path))
  if not isinstance(value, dict):
    raise UserError(f"{path} is not a JSON mapping.")
  return value


def parse_json(text: bytes, *, place: str, strict: bool = True) -> Any:
  """Returns the value of a JSON text.

  Args:
    text: The JSON, in UTF-8.
    place: Its origin, for errors.
    strict: Whether to refuse duplicate keys (otherwise the last is used) and non-finite numbers.

  Raises:
    UserError: It is invalid, nested too deeply, or has too many lists and mappings.
  """
  longer = len(text) > _MAX_CONTAINERS
  if longer and text.count(b"[") + text.count(b"{") > _MAX_CONTAINERS:
    raise UserError(f"{place} has more than {_MAX_CONTAINERS:,} lists and mappings.")
  if text.startswith(BOM.encode()):
    raise UserError(f"{place} begins with a byte order mark: save it in UTF-8 without one.")
  try:
    if not strict:
      return json.loads(text.decode("utf-8"))
    return json.loads(
      text.decode("utf-8"), object_pairs_hook=_mapping, parse_float=_finite, parse_constant=_finite
    )
  except RecursionError:
    raise UserError(f"{place} is nested too deeply.") from None
  except UnicodeDecodeError as error:
    raise UserError(f"{place} is not UTF-8 text: {error.reason} at {error.start}.") from None
  except ValueError as error:
    raise UserError(f"{place} is not JSON: {error}.") from None


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  result = dict(pairs)
  if len(result) != len(pairs):
    ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
    raise ValueError(f"duplicate key {twice!r}")
  return result


def _finite(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(f"{text} is not a finite number")
  return value


def _refuse_other_kinds(path: pathlib.Path, found: os.stat_result):
  if not stat.S_ISREG(found.st_mode):
    raise UserError(f"{path} is {kind(found)}, not a file.")


def _refuse_larger(path: pathlib.Path, size: int, limit: int | None):
  if limit is not None and size > limit:
    raise UserError(f"{path} has {size:,} bytes; the limit for such a file is {limit:,}.")


def _refuse_outside(path: pathlib.Path, folder: pathlib.Path, descriptor: int):
  target = pathlib.Path(os.path.realpath(path))
  root = pathlib.Path(os.path.realpath(folder))
  if not os.path.samestat(os.stat(target), os.fstat(descriptor)):
    raise UserError(f"{path} changed while it was being opened.")
  # In a huggingface_hub cache REPOSITORY/snapshots/REVISION/FILE is a link to
  # REPOSITORY/blobs/HASH. `blobs` is not resolved: if it is a link itself, its files are refused.
  places = [root] + [
    parent.parent / "blobs"
    for parent in root.parents
    if parent.name == "snapshots" and parent.parent.name.startswith(_CACHED)
  ]
  if not any(target.is_relative_to(place) for place in places):
    raise UserError(f"{path} is outside of {folder}, at {target}: copy the file into the folder.")
