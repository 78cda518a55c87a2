# SPDX-License-Identifier: Apache-2.0
"""Files, local or on an object store: paths, bounded reading, atomic writing, error messages."""

import contextlib
import errno
import io
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO, TypeVar

from etils import epath

from paxlike.errors import UserError, one_line

T = TypeVar("T")

_MAX_PATH = 4096  # Linux's limit in bytes; a system with a lower limit reports the error itself.
_MAX_FOLDERS = 500  # Python creates parent folders by recursion, which has a limited depth.
MAX_BYTES = 64_000_000  #: Default size limit of a run's files; records of metrics have none.


def absolute(path: str | os.PathLike[str]) -> epath.Path:
  """Returns an absolute path; a path on a bucket is returned as given.

  Raises:
    UserError: Its store is unknown, it names no bucket, or it is too long.
  """
  text = os.fspath(path)
  if "://" not in text:
    text = os.path.abspath(os.path.expanduser(text))
    if len(os.fsencode(text)) >= _MAX_PATH or text.count(os.sep) > _MAX_FOLDERS:
      folders, length = text.count(os.sep), len(text)
      raise UserError(f"{text[:100]}...: {folders:,} folders, {length:,} characters: too long.")
  elif not text.partition("://")[2].strip("/"):
    raise UserError(f"{text}: no bucket is named: expected gs://BUCKET/...")
  try:
    return epath.Path(text)
  except KeyError:
    raise UserError(f"{text}: expected a local folder or gs://...") from None


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


def reason(error: BaseException, *, within: epath.PathLike | None = None) -> str:
  """Returns an error's message in one line.

  If the error is about a file in the folder `within`, the file's relative path comes first.
  """
  text = getattr(error, "strerror", None) or str(error).strip() or repr(error)
  # For a store's error 404, clients report only the URL.
  found = "not found: " if isinstance(error, FileNotFoundError) and error.errno is None else ""
  named = os.fspath(getattr(error, "filename", None) or "")
  inside = within is not None and named.startswith(f"{os.fspath(within)}/")
  file = f"{os.path.relpath(named, within)}: " if inside else ""
  return file + found + text.splitlines()[0].rstrip(".")[:600]


def beginning_with(folder: epath.Path, prefix: str) -> list[epath.Path]:
  """Returns the paths in a folder whose names begin with `prefix`, sorted; [] without a folder."""
  if is_remote(folder):
    return sorted(folder.glob(f"{prefix}*"))
  # `epath.Path.glob` would interpret the folder's own name as a pattern.
  try:
    return sorted(folder / name for name in os.listdir(folder) if name.startswith(prefix))
  except (FileNotFoundError, NotADirectoryError):
    return []


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


class Stat(NamedTuple):
  """The size of a file in bytes, and when it was written, in whole seconds since 1970."""

  length: int
  mtime: int


def stat(path: epath.PathLike) -> Stat:
  """Returns the size and time of a file.

  `epath.Path.stat` also looks up the owner's name, which fails for users without one, as in
  containers.
  """
  if is_remote(path):
    found = epath.Path(path).stat()
    return Stat(found.length, int(found.mtime))
  local = os.stat(path)
  return Stat(local.st_size, int(local.st_mtime))


def read_bytes(path: epath.PathLike, *, limit: int | None = MAX_BYTES) -> bytes:
  """Returns the content of a run's file of at most `limit` bytes.

  Raises:
    OSError: It cannot be read, is larger, or is a pipe or a device.
  """
  check_file(path)
  file = epath.Path(path)
  if limit is not None and (size := stat(file).length) > limit:
    message = f"{file.name} has {size:,} bytes; the limit for such a file is {limit:,}"
    raise OSError(errno.EFBIG, message, os.fspath(path))
  return file.read_bytes()


def parse_output(path: str, parse: Callable[[Any], T], *, name: str, of: str) -> T:
  """Returns what `parse` makes of the JSON in a file, which a command printed.

  Args:
    path: The file, local or on a bucket.
    parse: Raises ValueError, TypeError, KeyError or AttributeError for other JSON.
    name: What the user calls the file.
    of: The flags of the command.

  Raises:
    UserError: It cannot be read, or is something else.
  """
  try:
    return parse(json.loads(read_bytes(path)))
  except UserError:
    raise
  except failures() as error:
    raise UserError(f"{name} cannot be read: {reason(error)}") from None
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise UserError(
      f"{name} is not the output of {of}: {type(error).__name__} {one_line(error)}"
    ) from None


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
