# SPDX-License-Identifier: Apache-2.0
"""Reads tensors from files of `torch.save`, without torch and without running code in them."""

import pathlib
import zipfile
from typing import Any, BinaryIO

import numpy as np

from paxlike import untrusted_files
from paxlike.convert import torch_pickle
from paxlike.convert.safetensors_files import Extent, TensorSpec
from paxlike.convert.torch_pickle import Tensor
from paxlike.errors import UserError

_LOCAL_HEADER = 30  # Bytes of a zip entry's header before its name and extra field.
_LISTING = "data.pkl"
_LISTING_BYTES = 4_000_000  # The longest listing that is read; enough for 25,000 tensors.
_ENCRYPTED = 1  # Bit of an entry's flags.


class TorchFile:
  """A file of weights; values are read on demand.

  Attributes:
    specs: Name -> shape and dtype.
  """

  def __init__(self, path: pathlib.Path):
    """Reads names, shapes and offsets.

    Raises:
      UserError: The file is missing, damaged or outside its folder, or holds more than weights.
    """
    with untrusted_files.opened(path, folder=path.parent) as stream:
      try:
        with zipfile.ZipFile(stream) as archive:
          entries = archive.infolist()
          content, root = _listing(archive)
      except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, UserError):
          raise UserError(f"{path} {error}.") from None
        raise UserError(f"{path} is damaged, or not a file of torch.save: {error}.") from None
      try:
        loaded = torch_pickle.load(content)
        named = _named(loaded)
        places = {info.filename: info for info in entries}
        identity = untrusted_files.identity(stream)
        self._extents = {
          name: Extent(path, identity, _offset(tensor, root, places, stream), _spec(tensor))
          for name, tensor in named.items()
        }
      except UserError as error:
        raise UserError(f"{path} {error}.") from None
    self.specs = {name: extent.spec for name, extent in self._extents.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, memory-mapped from the file."""
    return self._extents[name].read()


def _listing(archive: zipfile.ZipFile) -> tuple[bytes, str]:
  """Returns the pickle that lists the weights, and the prefix of the entries' names."""
  found = [info for info in archive.infolist() if info.filename.endswith(_LISTING)]
  if len(found) != 1:
    raise UserError(f"is not a file of torch.save: it has {len(found)} entries named {_LISTING}")
  _check(found[0])
  if found[0].file_size > _LISTING_BYTES:
    raise UserError(f"lists its weights in more than {_LISTING_BYTES:,} bytes")
  return archive.read(found[0]), found[0].filename.removesuffix(_LISTING)


def _named(loaded: Any) -> dict[str, Tensor]:
  if not isinstance(loaded, dict) or not all(
    isinstance(key, str) and isinstance(value, Tensor) for key, value in loaded.items()
  ):
    raise UserError("holds more than named weights")
  return loaded


def _spec(tensor: Tensor) -> TensorSpec:
  return TensorSpec(tensor.shape, tensor.storage.dtype)


def _offset(tensor: Tensor, root: str, places: dict[str, zipfile.ZipInfo], stream: BinaryIO) -> int:
  """Returns the offset of a tensor in the file.

  Raises:
    UserError: Its storage is missing, damaged or cut short.
  """
  key, dtype, size = tensor.storage
  info = places.get(f"{root}data/{key}")
  if info is None:
    raise UserError(f"is damaged: it lacks the storage {key}")
  _check(info)
  if info.file_size != size * dtype.itemsize:
    raise UserError(f"is damaged: the storage {key} does not have its declared size")
  stream.seek(info.header_offset)
  header = stream.read(_LOCAL_HEADER)
  if len(header) < _LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
    raise UserError(f"is damaged: no entry begins where the storage {key} should")
  texts = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
  begin = info.header_offset + _LOCAL_HEADER + texts
  if begin + info.file_size > untrusted_files.identity(stream).size:
    raise UserError(f"is cut short: the storage {key} ends after the file's end")
  return begin + tensor.first * dtype.itemsize


def _check(info: zipfile.ZipInfo):
  """Refuses a compressed or encrypted entry: a small one could unpack to more than memory holds."""
  if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
    raise UserError(f"has {info.filename} compressed, which torch.save never does")
  if info.flag_bits & _ENCRYPTED:
    raise UserError(f"has {info.filename} encrypted")
