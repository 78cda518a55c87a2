# SPDX-License-Identifier: Apache-2.0
"""Reads folders with `pytorch_model.bin`, the format of older Hugging Face models."""

import pathlib

import numpy as np

from paxlike.convert.safetensors_files import TensorSpec, read_json
from paxlike.convert.torch_files import TorchFile
from paxlike.errors import UserError

_SINGLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class TorchFolder:
  """The tensors of a folder by name; no code in its files is run.

  Attributes:
    specs: Name -> shape and dtype.
  """

  def __init__(self, path: pathlib.Path):
    """Reads names, shapes and offsets.

    Raises:
      UserError: A file is missing, damaged or outside the folder, or holds more than weights.
    """
    self._files: dict[str, TorchFile] = {}
    for name in _names(path):
      file = TorchFile(path / name)
      for tensor in file.specs:
        if tensor in self._files:
          raise UserError(f"{path}: {tensor} is in two files.")
        self._files[tensor] = file
    self.specs: dict[str, TensorSpec] = {
      tensor: file.specs[tensor] for tensor, file in self._files.items()
    }

  @staticmethod
  def is_at(path: pathlib.Path) -> bool:
    """Returns whether a folder has weights in these files."""
    return (path / _SINGLE).exists() or (path / _INDEX).exists()

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor, memory-mapped from its file."""
    return self._files[name].read(name)


def _names(path: pathlib.Path) -> list[str]:
  if (path / _SINGLE).exists():
    return [_SINGLE]
  listed = read_json(path / _INDEX).get("weight_map")
  if not isinstance(listed, dict) or not listed:
    raise UserError(f"{path / _INDEX} has no weight_map.")
  names = sorted(set(map(str, listed.values())))
  for name in names:
    if pathlib.PurePath(name).name != name or name in ("", ".", ".."):
      raise UserError(f"{path / _INDEX} names {name!r}, which is not in its folder.")
  return names
