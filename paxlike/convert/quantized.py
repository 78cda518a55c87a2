# SPDX-License-Identifier: Apache-2.0
"""Quantised tensors of published checkpoints, seen as the tensors that they stand for."""

import math
from typing import Protocol

import ml_dtypes
import numpy as np

from paxlike.convert.tensors import TensorSpec
from paxlike.errors import UserError

_FP8_SCALE = "_scale_inv"
# The 16 values of FP4 (E2M1), by their code.
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
  """A folder of tensors, of which those in FP8 and MXFP4 are given as numbers.

  DeepSeek stores FP8 (E4M3) matrices `X` beside `X_scale_inv`, a factor for each square block.
  gpt-oss stores MXFP4 (OCP Microscaling Formats, 1.0): `X_blocks` [..., F, D / 32, 16] of two
  values a byte, and `X_scales` [..., F, D / 32] of exponents, stand for X [..., D, F].

  Attributes:
    specs: Name -> shape and dtype of each tensor.
  """

  def __init__(self, tensors: Tensors, *, block: int = 128):
    """Reads no tensor.

    Args:
      tensors: As stored.
      block: Rows, and columns, that share a factor of FP8.

    Raises:
      UserError: A tensor and its scales do not fit.
    """
    self._tensors = tensors
    self._block = block
    self.specs: dict[str, TensorSpec] = {}
    for name, spec in tensors.specs.items():
      if name.endswith("_blocks") and spec.dtype == np.uint8:
        stem = name.removesuffix("_blocks")
        if len(spec.shape) < 3 or 2 * spec.shape[-1] != _FP4_BLOCK:
          raise UserError(f"{name} is {list(spec.shape)}, which is no shape of MXFP4.")
        self._check(f"{stem}_scales", spec.shape[:-1])
        *outer, F, groups, _ = spec.shape
        shape = (*outer, groups * _FP4_BLOCK, F)
        self.specs[stem] = TensorSpec(shape, np.dtype(ml_dtypes.bfloat16))
      elif spec.dtype == ml_dtypes.float8_e4m3fn:
        if len(spec.shape) != 2:
          raise UserError(f"{name} is {list(spec.shape)}: only matrices are read in FP8.")
        self._check(name + _FP8_SCALE, tuple(math.ceil(size / block) for size in spec.shape))
        self.specs[name] = TensorSpec(spec.shape, np.dtype(np.float32))
      elif not (self._is_scale(name, _FP8_SCALE, "") or self._is_scale(name, "_scales", "_blocks")):
        self.specs[name] = spec
    self._held = ("", np.zeros(0))  # What was read last: several weights may be parts of it.

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor."""
    if name != self._held[0]:
      self._held = ("", np.zeros(0))
      self._held = (name, self._read(name))
    return self._held[1]

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
      raise UserError(f"the tensors are quantised, but {scales} is missing.")
    if scales.endswith("_scales") and spec.dtype != np.uint8:
      raise UserError(f"{scales} is of {spec.dtype}, not of exponents in uint8.")
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
