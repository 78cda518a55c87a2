# SPDX-License-Identifier: Apache-2.0
"""The files `owner_N.json` of a run's folder, one for each process that has owned it.

A process that takes over from owner N creates file N + 1 exclusively, so only one of several
succeeds. A file system must support O_EXCL (NFS does since version 3), an object store conditional
creation.
"""

import json
import os
import re
import time

from etils import epath

from paxlike import file_io
from paxlike.processes.owner import Owner

_PREFIX = "owner_"
_NAME = re.compile(rf"{_PREFIX}([0-9]+)\.json")
_SIZE = 512  # Constant size of the file in bytes, so that each write replaces all of it.
_TYPES = (str, str, int, str, int, bool, str)  # Of the fields of `Owner`.


def path_of(folder: epath.Path, number: int) -> epath.Path:
  """Returns the path of an owner file."""
  return folder / f"{_PREFIX}{number:08d}.json"


def numbers(folder: epath.Path) -> list[int]:
  """Returns the numbers of all owner files, the newest last."""
  if file_io.is_remote(folder):
    import fsspec

    store, root = fsspec.core.url_to_fs(os.fspath(folder))
    store.invalidate_cache()
    names = [name.rpartition("/")[2] for name in store.glob(f"{root}/{_PREFIX}*")]
  else:
    names = os.listdir(folder)
  return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def newest(folder: epath.Path) -> int:
  """Returns the number of the newest owner file; 0 without one."""
  return max(numbers(folder), default=0)


def read(folder: epath.Path, number: int) -> tuple[Owner | None, bytes | None]:
  """Returns (owner, content of its file).

  The owner is None if the file is missing, unfinished or malformed; the content is None if it is
  missing.
  """
  try:
    data = file_io.read_bytes(path_of(folder, number))
  except FileNotFoundError:
    return None, None
  try:
    owner = Owner(**json.loads(data))
  except file_io.MALFORMED:
    return None, data
  known = all(type(value) is kind for value, kind in zip(owner, _TYPES, strict=True))
  return owner if known and owner.pid > 0 else None, data


def age(folder: epath.Path, number: int) -> float:
  """Returns the seconds since an owner file was written, by this machine's clock."""
  return time.time() - file_io.stat(path_of(folder, number)).mtime


def create(folder: epath.Path, number: int, owner: Owner) -> bool:
  """Creates the file of an owner exclusively; returns False if it already exists."""
  path = path_of(folder, number)
  if not file_io.is_remote(folder):
    try:
      file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
      return False
    try:
      with os.fdopen(file, "wb") as file:
        file.write(_data(owner))
        file.flush()
        os.fsync(file.fileno())
    except OSError:
      path.unlink(missing_ok=True)  # The next start would wait for a heartbeat in it.
      raise
    return True
  import fsspec

  store, name = fsspec.core.url_to_fs(os.fspath(path))
  try:
    store.pipe_file(name, _data(owner), mode="create")
  except FileExistsError:
    return False
  except file_io.failures() as error:
    if str(getattr(error, "code", "")) == "412":
      return False
    raise
  return True


def rewrite(folder: epath.Path, number: int, owner: Owner):
  """Replaces the content of the file of an owner."""
  path = path_of(folder, number)
  if file_io.is_remote(path):
    path.write_bytes(_data(owner))
    return
  file = os.open(path, os.O_WRONLY)
  try:
    os.pwrite(file, _data(owner), 0)
    os.fsync(file)
  finally:
    os.close(file)


def _data(owner: Owner) -> bytes:
  return (json.dumps(owner._asdict()) + "\n").encode().rjust(_SIZE)
