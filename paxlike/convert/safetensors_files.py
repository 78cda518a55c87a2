# SPDX-License-Identifier: Apache-2.0
"""Reads and writes safetensors files, one tensor at a time.

The safetensors library cannot read FP8 into NumPy, and needs all of a file in memory to write it.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from paxlike import untrusted_files
from paxlike.errors import UserError

_DTYPES: dict[str, Any] = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E5M2": ml_dtypes.float8_e5m2,
  "F8_E8M0": ml_dtypes.float8_e8m0fnu,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_CHUNK_BYTES = 16_000_000
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEADER_BYTES = 32_000_000  # The longest header that is read; enough for 200,000 tensors.
_MAX_DIMS = 32


class TensorSpec(NamedTuple):
  """The shape and dtype of a tensor."""

  shape: tuple[int, ...]
  dtype: np.dtype


class Extent(NamedTuple):
  """A tensor's place in a file; `identity` detects that the file has changed since."""

  file: pathlib.Path
  identity: untrusted_files.Identity
  offset: int
  spec: TensorSpec

  def read(self) -> np.ndarray:
    """Returns the tensor, memory-mapped from its file."""
    shape, dtype = self.spec
    if not math.prod(shape):
      return np.zeros(shape, dtype)
    with untrusted_files.opened(self.file) as stream:
      if untrusted_files.identity(stream) != self.identity:
        raise UserError(f"{self.file} has changed while it was read.")
      raw = np.memmap(stream, np.uint8, "r", self.offset, (_bytes(self.spec),))
    return np.asarray(raw).view(dtype).reshape(shape)


class TensorFolder:
  """The tensors of a folder (or a file) by name; values are read on demand.

  Attributes:
    specs: Name -> shape and dtype.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the headers.

    Raises:
      UserError: A file is missing, damaged or outside the folder.
    """
    self._extents: dict[str, Extent] = {}
    folder = path if os.path.isdir(path) else path.parent
    for file in _files(path):
      for name, extent in _header(file, folder).items():
        if name in self._extents:
          raise UserError(f"{name} is in {self._extents[name].file} and in {file}.")
        self._extents[name] = extent
    self.specs = {name: extent.spec for name, extent in self._extents.items()}

  @staticmethod
  def is_at(path: pathlib.Path) -> bool:
    """Returns whether a folder has safetensors files under the names that transformers reads."""
    return any(untrusted_files.is_there(path / name) for name in (_SINGLE, _INDEX))

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, memory-mapped from its file."""
    return self._extents[name].read()


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  if not untrusted_files.is_there(path):
    raise UserError(f"--path={path}: no such file or folder.")
  if not os.path.isdir(path):
    return [path]
  # As in transformers, a single file takes precedence over an index, which may be a leftover.
  if untrusted_files.is_there(path / _SINGLE):
    return [path / _SINGLE]
  index = path / _INDEX
  if untrusted_files.is_there(index):
    names = untrusted_files.read_json(index, folder=path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
      raise UserError(f"{index} is damaged: weight_map is not a mapping to file names.")
    for name in sorted(set(names.values())):
      if pathlib.PurePosixPath(name).name != name or name == "..":
        raise UserError(f"{index} is damaged: {name!r} is not the name of a file in its folder.")
    files = sorted(path / name for name in set(names.values()))
  else:
    files = sorted(path.glob("*.safetensors"))
  if not files:
    raise UserError(f"--path={path} holds no .safetensors file.")
  return files


def _header(file: pathlib.Path, folder: pathlib.Path) -> dict[str, Extent]:
  """Returns the tensors of a file, which must fill it without gap or overlap."""
  with untrusted_files.opened(file, folder=folder) as stream:
    identity = untrusted_files.identity(stream)
    size = int.from_bytes(stream.read(8), "little")
    if not 2 <= size <= identity.size - 8:
      raise UserError(f"{file} is damaged: no header. Is it cut short, or not safetensors?")
    if size > _HEADER_BYTES:
      raise UserError(f"{file} has a header of {size:,} bytes; at most {_HEADER_BYTES:,} are read.")
    entries = untrusted_files.parse_json(stream.read(size), place=f"the header of {file}")
  if not isinstance(entries, dict):
    raise UserError(f"{file} is damaged: its header is not a mapping.")
  entries.pop("__metadata__", None)
  start, end = 8 + size, 0
  extents = {}
  placed = [(name, *_entry(file, name, entry)) for name, entry in entries.items()]
  for name, spec, begin in sorted(placed, key=lambda one: (one[2], _bytes(one[1]))):
    if begin != end:
      what = "overlaps the tensor before it" if begin < end else "leaves a gap before it"
      raise UserError(f"{file} is damaged: {name} {what}.")
    end += _bytes(spec)
    extents[name] = Extent(file, identity, start + begin, spec)
  if start + end > identity.size:
    raise UserError(f"{file} is cut short: it has {identity.size:,} of {start + end:,} bytes.")
  if start + end < identity.size:
    raise UserError(f"{file} is damaged: its last tensor is not at its end.")
  return extents


def _entry(file: pathlib.Path, name: str, entry: Any) -> tuple[TensorSpec, int]:
  """Returns the spec of a tensor and its offset after the header, from its entry in the header."""
  if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
    raise UserError(f"{file} is damaged: {name} must have exactly dtype, shape and data_offsets.")
  dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
  if not isinstance(dtype, str) or dtype not in _DTYPES:
    raise UserError(f"{file}: {name} is of dtype {dtype!r}; known are {', '.join(_DTYPES)}.")
  if not is_shape(shape):
    raise UserError(f"{file} is damaged: {name} has an invalid shape.")
  if not (is_shape(offsets) and len(offsets) == 2):
    raise UserError(f"{file} is damaged: {name} has invalid data_offsets.")
  spec = TensorSpec(tuple(shape), np.dtype(_DTYPES[dtype]))
  if offsets[1] - offsets[0] != _bytes(spec):
    raise UserError(f"{file} is damaged: {name} does not have the size of its shape.")
  return spec, offsets[0]


def is_shape(value: Any) -> bool:
  """Returns whether a value is a list or tuple of sizes or offsets."""
  return (
    isinstance(value, list | tuple)
    and len(value) <= _MAX_DIMS
    and all(type(size) is int and 0 <= size < 2**63 for size in value)
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the mapping in a JSON file, which must not be a link out of its folder.

  Raises:
    UserError: The file is missing, damaged or such a link.
  """
  return untrusted_files.read_json(path, folder=path.parent)


def write(
  folder: pathlib.Path,
  specs: Mapping[str, TensorSpec],
  value: Callable[[str], np.ndarray],
  *,
  shard_bytes: int = 5_000_000_000,
):
  """Writes tensors into one file, or into several and an index, as Hugging Face does.

  Args:
    folder: An empty folder.
    specs: Name -> shape and dtype.
    value: Returns a tensor by name, in any dtype; called once for each, in the order of `specs`.
    shard_bytes: The largest file, unless a single tensor is larger.

  Raises:
    UserError: A value is beyond the range of the dtype in which it is written.
  """
  shards: list[list[str]] = [[]]
  filled = 0
  for name, spec in specs.items():
    size = _bytes(spec)
    if filled and filled + size > shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(name)
    filled += size
  total, files = len(shards), {}
  for number, names in enumerate(shards, 1):
    file = _SINGLE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
    write_file(folder / file, {name: specs[name] for name in names}, value)
    files |= dict.fromkeys(names, file)
  if total > 1:
    size = sum(map(_bytes, specs.values()))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
  file: pathlib.Path, specs: Mapping[str, TensorSpec], value: Callable[[str], np.ndarray]
):
  """Writes tensors into one file; arguments and errors as in `write`."""
  header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
  begin = 0
  for name, spec in specs.items():
    end = begin + _bytes(spec)
    dtype = _NAMES[spec.dtype]
    header[name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    begin = end
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % 8)
  with file.open("wb") as stream:
    stream.write(len(text).to_bytes(8, "little") + text)
    for name, spec in specs.items():
      # Not bound to a name, so that it is freed before the next one is made.
      _write_tensor(stream, name, value(name), spec)


def _write_tensor(stream: BinaryIO, name: str, tensor: np.ndarray, spec: TensorSpec):
  assert tensor.shape == spec.shape
  for chunk in _chunks(name, tensor, spec.dtype):
    stream.write(chunk.view(np.uint8).data)


def _chunks(name: str, tensor: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
  """Yields a tensor as contiguous chunks in `dtype`; it may be a strided view of another dtype."""
  rows: Any = tensor.reshape(1) if tensor.ndim == 0 else tensor
  step = max(1, _CHUNK_BYTES * len(rows) // max(tensor.size * dtype.itemsize, 1))
  for first in range(0, len(rows), step):
    yield np.ascontiguousarray(cast(name, rows[first : first + step], dtype))


def cast(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns values of the tensor `name` in a dtype.

  Raises:
    UserError: A finite value becomes infinite.
  """
  with np.errstate(over="ignore"):
    result = values.astype(dtype, copy=False)
  infinite = np.isinf(result) if not np.can_cast(values.dtype, dtype) else None
  if infinite is not None and len(lost := values[infinite & np.isfinite(values)]):
    raise UserError(
      f"{name} has {float(lost[0]):g}, which is beyond the range of --dtype={dtype}: give a dtype"
      " with a larger range."
    )
  return result


def check_range(name: str, tensor: np.ndarray, dtype: np.dtype):
  """Raises a UserError if a finite value of a tensor becomes infinite in a dtype."""
  if not np.can_cast(tensor.dtype, dtype):
    for _ in _chunks(name, tensor, dtype):
      pass


def _bytes(spec: TensorSpec) -> int:
  return math.prod(spec.shape) * spec.dtype.itemsize
