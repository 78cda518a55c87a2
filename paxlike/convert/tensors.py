# SPDX-License-Identifier: Apache-2.0
"""Files of tensors in the safetensors format, read and written one tensor at a time.

The library of that name cannot read FP8 into NumPy, and writes a file only from memory as a whole.
"""

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

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
_PART_BYTES = 16_000_000
_INDEX = "model.safetensors.index.json"


class TensorSpec(NamedTuple):
  """What is known of a tensor without reading it."""

  shape: tuple[int, ...]
  dtype: np.dtype


class _Place(NamedTuple):
  file: pathlib.Path
  offset: int
  spec: TensorSpec


class TensorFolder:
  """The tensors of a folder (or a file) by name; their values are read when asked for.

  Attributes:
    specs: Name -> shape and dtype.
  """

  def __init__(self, path: pathlib.Path):
    """Reads the headers.

    Raises:
      UserError: There is no such file, or one is damaged.
    """
    self._places: dict[str, _Place] = {}
    for file in _files(path):
      for name, place in _header(file).items():
        if name in self._places:
          raise UserError(f"{name} is in {self._places[name].file} and in {file}.")
        self._places[name] = place
    self.specs = {name: place.spec for name, place in self._places.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, mapped from its file: its bytes are read as they are used."""
    file, offset, (shape, dtype) = self._places[name]
    if not math.prod(shape):
      return np.zeros(shape, dtype)
    raw = np.memmap(file, np.uint8, "r", offset, (math.prod(shape) * dtype.itemsize,))
    return np.asarray(raw).view(dtype).reshape(shape)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
  if path.is_file():
    return [path]
  if not path.is_dir():
    raise UserError(f"--path={path}: no such file or folder.")
  if (path / _INDEX).exists():
    try:
      names = set(json.loads((path / _INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise UserError(f"{path / _INDEX} is damaged: {error}.") from None
    files = sorted(path / name for name in names)
  else:
    files = sorted(path.glob("*.safetensors"))
  if not files:
    raise UserError(f"--path={path} holds no .safetensors file.")
  return files


def _header(file: pathlib.Path) -> dict[str, _Place]:
  try:
    with file.open("rb") as stream:
      size = int.from_bytes(stream.read(8), "little")
      length = file.stat().st_size
      if not 2 <= size <= min(length - 8, 100_000_000):
        raise UserError(f"{file} is damaged: no header. Is it cut short, or no safetensors file?")
      entries = json.loads(stream.read(size))
    places = {}
    for name, entry in entries.items():
      if name != "__metadata__":
        spec = TensorSpec(tuple(entry["shape"]), np.dtype(_DTYPES[entry["dtype"]]))
        begin, end = entry["data_offsets"]
        if end - begin != math.prod(spec.shape) * spec.dtype.itemsize:
          raise UserError(f"{file} is damaged: {name} has not the size of its shape.")
        if end > length - 8 - size:
          raise UserError(f"{file} is cut short: {name} ends after the file's end.")
        places[name] = _Place(file, 8 + size + begin, spec)
    return places
  except OSError as error:
    raise UserError(f"{file} cannot be read: {error.strerror}.") from None
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(f"{file} is damaged: its header holds {error}.") from None


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """Returns the mapping in a JSON file.

  Raises:
    UserError: There is none.
  """
  try:
    config = json.loads(path.read_text())
  except OSError as error:
    raise UserError(f"{path} cannot be read: {error.strerror}.") from None
  except ValueError as error:
    raise UserError(f"{path} is no JSON: {error}.") from None
  if not isinstance(config, dict):
    raise UserError(f"{path} holds no mapping.")
  return config


def write(
  folder: pathlib.Path,
  specs: Mapping[str, TensorSpec],
  value: Callable[[str], np.ndarray],
  *,
  shard_bytes: int = 5_000_000_000,
):
  """Writes tensors into one file, or into several and an index, as Hugging Face does.

  Args:
    folder: An empty one.
    specs: Name -> shape and dtype.
    value: Returns a tensor by name, whose dtype may be another; each is asked for once, in the
      order of `specs`.
    shard_bytes: Files hold so much, unless a single tensor is larger.
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
    file = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
    write_file(folder / file, {name: specs[name] for name in names}, value)
    files |= dict.fromkeys(names, file)
  if total > 1:
    size = sum(map(_bytes, specs.values()))
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
  file: pathlib.Path, specs: Mapping[str, TensorSpec], value: Callable[[str], np.ndarray]
):
  """Writes tensors into one file; arguments as of `write`."""
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
      _write_tensor(stream, value(name), spec)  # No name keeps it while the next one is made.


def _write_tensor(stream: BinaryIO, tensor: np.ndarray, spec: TensorSpec):
  """Writes a tensor, converted a part at a time: it may be a view in another order or dtype."""
  assert tensor.shape == spec.shape
  rows: Any = tensor.reshape(1) if tensor.ndim == 0 else tensor
  step = max(1, _PART_BYTES * len(rows) // max(_bytes(spec), 1))
  for first in range(0, len(rows), step):
    part = np.ascontiguousarray(rows[first : first + step], dtype=spec.dtype)
    stream.write(part.view(np.uint8).data)


def _bytes(spec: TensorSpec) -> int:
  return math.prod(spec.shape) * spec.dtype.itemsize


def total_bytes(specs: Iterable[TensorSpec]) -> int:
  """Returns the bytes of all."""
  return sum(map(_bytes, specs))
