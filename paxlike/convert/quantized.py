# SPDX-License-Identifier: Apache-2.0
"""Dequantizes the FP8 and MXFP4 tensors of published checkpoints."""

import math
from typing import Protocol

import ml_dtypes
import numpy as np

from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError

_FP8_SCALE = "_scale_inv"
# The values of FP4 (E2M1) by code; the fourth bit is the sign.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4]).astype(ml_dtypes.bfloat16)
_FP4_BLOCK = 32


class Tensors(Protocol):
  """Tensors by name."""

  specs: dict[str, TensorSpec]

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor."""
    ...


class Dequantized:
  """The tensors of a folder, with those in FP8 and MXFP4 dequantized.

  DeepSeek stores a matrix `X` in FP8 (E4M3) with `X_scale_inv`, a scale for each square block.
  gpt-oss stores X [..., D, F] in MXFP4 (OCP Microscaling Formats, 1.0): `X_blocks`
  [..., F, D / 32, 16] has two values a byte, and `X_scales` [..., F, D / 32] has exponents.

  Attributes:
    specs: Name -> shape and dtype of each tensor.
  """

  def __init__(self, tensors: Tensors, *, block: int = 128):
    """Reads no tensor.

    Args:
      tensors: As stored.
      block: Side of the square blocks that share an FP8 scale.

    Raises:
      UserError: A quantized tensor has an unsupported shape, or its scales do not match it.
    """
    self._tensors = tensors
    self._block = block
    self.specs: dict[str, TensorSpec] = {}
    for name, spec in tensors.specs.items():
      if name.endswith("_blocks") and spec.dtype == np.uint8:
        stem = name.removesuffix("_blocks")
        if len(spec.shape) < 3 or 2 * spec.shape[-1] != _FP4_BLOCK:
          raise UserError(f"{name} is {list(spec.shape)}, which is not a shape of MXFP4.")
        self._check(f"{stem}_scales", spec.shape[:-1])
        *outer, F, groups, _ = spec.shape
        shape = (*outer, groups * _FP4_BLOCK, F)
        self.specs[stem] = TensorSpec(shape, np.dtype(ml_dtypes.bfloat16))
      elif spec.dtype == ml_dtypes.float8_e4m3fn:
        if len(spec.shape) != 2:
          raise UserError(f"{name} is {list(spec.shape)}: FP8 is supported for matrices only.")
        self._check(name + _FP8_SCALE, tuple(math.ceil(size / block) for size in spec.shape))
        self.specs[name] = TensorSpec(spec.shape, np.dtype(np.float32))
      elif not (self._is_scale(name, _FP8_SCALE, "") or self._is_scale(name, "_scales", "_blocks")):
        self.specs[name] = spec
    self._last = ("", np.zeros(0))  # The last tensor read: several weights may be slices of it.

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor."""
    if name != self._last[0]:
      self._last = ("", np.zeros(0))
      self._last = (name, self._read(name))
    return self._last[1]

  def _read(self, name: str) -> np.ndarray:
    if name not in self._tensors.specs:
      blocks = self._tensors.read(f"{name}_blocks")
      return _from_mxfp4(blocks, self._tensors.read(f"{name}_scales"))
    tensor = self._tensors.read(name)
    if tensor.dtype != ml_dtypes.float8_e4m3fn:
      return tensor
    scales = self._tensors.read(name + _FP8_SCALE).astype(np.float32)
    tensor = tensor.astype(np.float32)
    for row, factors in enumerate(scales):
      rows = tensor[row * self._block : (row + 1) * self._block]
      rows *= np.repeat(factors, self._block)[: rows.shape[1]]
    return tensor

  def _is_scale(self, name: str, suffix: str, of: str) -> bool:
    return name.endswith(suffix) and name.removesuffix(suffix) + of in self._tensors.specs

  def _check(self, scales: str, shape: tuple[int, ...]):
    spec = self._tensors.specs.get(scales)
    if spec is None:
      raise UserError(f"the tensors are quantized, but {scales} is missing.")
    if scales.endswith("_scales") and spec.dtype != np.uint8:
      raise UserError(f"{scales} has dtype {spec.dtype}, but exponents are uint8.")
    if spec.shape != shape:
      raise UserError(f"{scales} is {list(spec.shape)}, not {list(shape)}.")


def _from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
  """Returns [..., D, F] in bfloat16, which holds every value of MXFP4 exactly."""
  *outer, F, groups, half = blocks.shape
  result = np.empty((*outer, groups * 2 * half, F), ml_dtypes.bfloat16)
  for index in np.ndindex(*outer):
    values = np.empty((F, groups, 2 * half), np.float32)
    values[..., 0::2] = _FP4_VALUES[blocks[index] & 15]
    values[..., 1::2] = _FP4_VALUES[blocks[index] >> 4]
    values = np.ldexp(values, scales[index].astype(np.int32)[..., None] - 127)
    result[index] = values.reshape(F, -1).T
  return result
