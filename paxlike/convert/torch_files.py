# SPDX-License-Identifier: Apache-2.0
"""Tensors of files that `torch.save` wrote, read without torch, and no code in them run."""

import math
import pathlib
import pickle
import zipfile
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from paxlike.convert.tensors import TensorSpec
from paxlike.errors import UserError

_STORAGES: dict[str, Any] = {
  "DoubleStorage": np.float64,
  "FloatStorage": np.float32,
  "HalfStorage": np.float16,
  "BFloat16Storage": ml_dtypes.bfloat16,
  "LongStorage": np.int64,
  "IntStorage": np.int32,
  "ShortStorage": np.int16,
  "CharStorage": np.int8,
  "ByteStorage": np.uint8,
  "BoolStorage": np.bool_,
}
_LOCAL_HEADER = 30  # Bytes of the header in front of each entry of a zip file, but for its texts.


class _Storage(NamedTuple):
  key: str
  dtype: np.dtype


class _Tensor(NamedTuple):
  storage: _Storage
  first: int
  shape: tuple[int, ...]


class TorchFile:
  """A file of weights; their values are read when asked for.

  Attributes:
    specs: Name -> shape and dtype.
  """

  def __init__(self, path: pathlib.Path):
    """Reads names and places.

    Raises:
      UserError: The file is missing or damaged, or holds more than weights.
    """
    self._path = path
    try:
      with zipfile.ZipFile(path) as archive:
        (listing,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
        with archive.open(listing) as stream:
          loaded = _Unpickler(stream).load()
        self._root = listing.removesuffix("data.pkl")
        self._offsets = {info.filename: self._offset(info) for info in archive.infolist()}
    except FileNotFoundError:
      raise UserError(f"{path}: no such file.") from None
    except (zipfile.BadZipFile, ValueError, EOFError, pickle.UnpicklingError) as error:
      if isinstance(error, UserError):
        raise
      raise UserError(f"{path} is damaged, or no file of torch.save: {error}.") from None
    if not isinstance(loaded, dict) or not all(isinstance(v, _Tensor) for v in loaded.values()):
      raise UserError(f"{path} holds more than named weights.")
    self._tensors: dict[str, _Tensor] = loaded
    self.specs = {n: TensorSpec(t.shape, t.storage.dtype) for n, t in self._tensors.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, mapped from the file."""
    storage, first, shape = self._tensors[name]
    begin = self._offsets[f"{self._root}data/{storage.key}"] + first * storage.dtype.itemsize
    size = math.prod(shape) * storage.dtype.itemsize
    if begin + size > self._path.stat().st_size:
      raise UserError(f"{self._path} is cut short: {name} ends after the file's end.")
    raw = np.memmap(self._path, np.uint8, "r", begin, (size,))
    return np.asarray(raw).view(storage.dtype).reshape(shape)

  def _offset(self, info: zipfile.ZipInfo) -> int:
    if info.compress_type != zipfile.ZIP_STORED:
      raise UserError(f"{self._path}: {info.filename} is compressed, which torch.save never does.")
    with self._path.open("rb") as stream:
      stream.seek(info.header_offset)
      header = stream.read(_LOCAL_HEADER)
    texts = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return info.header_offset + _LOCAL_HEADER + texts


class _Named(dict[str, Any]):
  """What stands for `collections.OrderedDict`, which torch gives attributes."""


class _Unpickler(pickle.Unpickler):
  """Knows names of storages and how tensors are made of them, and refuses all other names."""

  def find_class(self, module: str, name: str) -> Any:
    if (module, name) == ("collections", "OrderedDict"):
      return _Named
    if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
      return _rebuild
    if module == "torch" and name in _STORAGES:
      return np.dtype(_STORAGES[name])
    raise UserError(f"a file of weights wants {module}.{name}: it holds more than weights.")

  def persistent_load(self, pid: Any) -> _Storage:
    _, dtype, key, *_ = pid
    return _Storage(str(key), dtype)


def _rebuild(
  storage: _Storage, first: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
  dense = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
  if any(size > 1 and a != b for size, a, b in zip(shape, strides, dense, strict=True)):
    raise UserError("a file of weights holds a tensor that is a view of another.")
  return _Tensor(storage, first, tuple(shape))
