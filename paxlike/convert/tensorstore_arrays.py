# SPDX-License-Identifier: Apache-2.0
"""Reads the arrays in a folder that Orbax or TensorStore wrote, any slice of them.

Each array is in Zarr format (2 or 3), in a folder of its own, or all of them are in one database
(OCDBT). Orbax's own handlers are not used, because they read whole arrays only, into memory.
"""

import math
import operator
import os
import pathlib
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlike import file_io, untrusted_files
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError

_DATABASE = "manifest.ocdbt"
# Metadata file of an array -> TensorStore's driver.
_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
# Arrays may be larger than this if they have at most so many bytes for each in the files.
_UNPACKED_BYTES, _MOST_UNPACKED = 64 * 2**20, 500
_MOST_KEYS = 5_000_000  # Entries of a database that are listed: chunks and metadata.


class _Stored(NamedTuple):
  array: Any  # tensorstore.TensorStore
  spec: TensorSpec


class TensorStoreArrays:
  """The arrays of a folder by name, such as "params.params.decoder.decoder_norm.scale".

  Attributes:
    path: The folder.
    specs: Name -> shape and dtype.
  """

  def __init__(
    self,
    path: pathlib.Path,
    *,
    prefixes: Sequence[str],
    root: str,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
  ):
    """Reads the metadata of the arrays whose names begin with one prefix.

    The prefix is removed, and ".value" at the end, which Flax NNX adds to the name of a variable.

    Args:
      path: The folder.
      prefixes: The prefixes; the first that `root` follows in a name is used.
      root: The beginning of the names of a model's arrays, such as "decoder.".
      shapes: Name with the prefix -> shape without padding at the ends of dims.

    Raises:
      UserError: The folder holds no such arrays, is damaged, or has links or pipes in it.
    """
    self.path = path
    size = _checked_bytes(path)
    names = _names(path)
    used = [p for p in prefixes if any(name.startswith(p + root) for name in names)]
    if not used:
      found = f"it has {len(names)} others, such as {min(names)}" if names else "it has none"
      raise UserError(f"{path} has no arrays {prefixes[0]}{root}*: {found}.")
    prefix = used[0]
    chosen = {name: driver for name, driver in names.items() if name.startswith(prefix)}
    opened = {name: _open(path, name, driver) for name, driver in sorted(chosen.items())}
    self._arrays: dict[str, _Stored] = {}
    for name, future in opened.items():
      short = name.removeprefix(prefix).removesuffix(".value")
      self._arrays[short] = _finish(path, name, future, (shapes or {}).get(name))
    self.specs = {name: array.spec for name, array in self._arrays.items()}
    unpacked = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.specs.values())
    if unpacked > max(_UNPACKED_BYTES, _MOST_UNPACKED * size):
      raise UserError(f"{path} has files of {size:,} bytes that unpack to {unpacked:,}: too many.")

  def read(self, name: str, part: Any = ...) -> np.ndarray:
    """Returns an array, or a part of it, such as `(slice(None), slice(0, 4))`.

    Raises:
      UserError: Its data are missing or damaged.
    """
    try:
      return self._arrays[name].array[part].read().result()
    except (ValueError, OSError, RuntimeError) as error:
      raise _damaged(self.path, name, error) from None


def is_at(path: pathlib.Path) -> bool:
  """Returns whether a folder holds arrays."""
  if untrusted_files.is_there(path / _DATABASE):
    return True
  with os.scandir(path) as entries:
    return any(
      entry.is_dir() and any(untrusted_files.is_there(path / entry.name / f) for f in _DRIVERS)
      for entry in entries
    )


def _checked_bytes(path: pathlib.Path) -> int:
  """Returns the number of bytes in a folder, which may hold regular files and folders only."""
  total = 0
  for folder, folders, files in os.walk(path, onerror=_raise):
    for name in (*folders, *files):
      found = os.lstat(os.path.join(folder, name))
      if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        what = "a link" if stat.S_ISLNK(found.st_mode) else untrusted_files.kind(found)
        raise UserError(f"{os.path.join(folder, name)} is {what}: a checkpoint has only files.")
      total += found.st_size
  return total


def _raise(error: OSError):
  raise error


def _names(path: pathlib.Path) -> dict[str, str]:
  """Returns the driver of each array in a folder, by name."""
  if untrusted_files.is_there(path / _DATABASE):
    keys = _keys(path)
  else:
    keys = [
      f"{entry.name}/{file}"
      for entry in os.scandir(path)
      if entry.is_dir()
      for file in _DRIVERS
      if untrusted_files.is_there(path / entry.name / file)
    ]
  split = (key.rpartition("/") for key in keys)
  return {name: _DRIVERS[file] for name, _, file in split if file in _DRIVERS}


def _keys(path: pathlib.Path) -> list[str]:
  import tensorstore as ts

  try:
    store = ts.KvStore.open(_database(path)).result()
    keys = store.list().result()
  except (ValueError, OSError, RuntimeError) as error:
    raise UserError(f"{path / _DATABASE} is damaged: {_reason(error, path)}.") from None
  if len(keys) > _MOST_KEYS:
    raise UserError(f"{path} has {len(keys):,} entries; at most {_MOST_KEYS:,} are read.")
  return [key.decode(errors="replace") for key in keys]


def _database(path: pathlib.Path) -> dict[str, Any]:
  return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(path)}/"}}


def _open(path: pathlib.Path, name: str, driver: str) -> Any:
  """Returns a future of an array."""
  import tensorstore as ts

  if untrusted_files.is_there(path / _DATABASE):
    store = {**_database(path), "path": f"{name}/"}
  else:
    store = {"driver": "file", "path": f"{os.path.abspath(path / name)}/"}
  spec = {"driver": driver, "kvstore": store, "fill_missing_data_reads": False}
  return ts.open(spec, open=True, read=True)


def _finish(path: pathlib.Path, name: str, future: Any, shape: tuple[int, ...] | None) -> _Stored:
  """Returns an opened array, without padding if its `shape` is given."""
  try:
    array = future.result()
    stored, chunk = tuple(array.shape), array.chunk_layout.read_chunk.shape
    dtype = np.dtype(array.dtype.numpy_dtype)
  except (ValueError, OSError, RuntimeError, TypeError) as error:
    raise _damaged(path, name, error) from None
  if any(one > max(size, 1) for one, size in zip(chunk or (), stored, strict=True)):
    raise UserError(f"{path}: {name} is damaged: its chunks {chunk} exceed {list(stored)}.")
  if shape is not None and shape != stored:
    if len(shape) != len(stored) or any(map(operator.gt, shape, stored)):
      raise UserError(f"{path}: {name} is {list(stored)}, but {list(shape)} by its metadata.")
    array = array[tuple(slice(0, size) for size in shape)]
  return _Stored(array, TensorSpec(tuple(array.shape), dtype))


def _damaged(path: pathlib.Path, name: str, error: Exception) -> UserError:
  return UserError(f"{path}: {name} is missing or damaged: {_reason(error, path)}.")


def _reason(error: Exception, path: pathlib.Path) -> str:
  text = file_io.reason(error, within=path) if isinstance(error, OSError) else str(error)
  text = " ".join(text.split()).split(" [source locations=")[0].split(" [")[0]
  return text if len(text) < 200 else f"{text[:197]}..."
