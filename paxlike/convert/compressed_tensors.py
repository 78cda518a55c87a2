# SPDX-License-Identifier: Apache-2.0
"""Dequantizes weights in the format of compressed-tensors, which vLLM reads."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from paxlike.convert.quantized import Tensors
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError

_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized")
_PACKED, _SCALE, _SHAPE = ".weight_packed", ".weight_scale", ".weight_shape"
_STORED = (np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn))
_BITS = (4, 8)


class Decompressed:
  """The tensors of a folder, with compressed ones dequantized to float32.

  A matrix `X.weight` [F, D] is stored as int8 or FP8 under its name, or packed into int32 as
  `X.weight_packed` with `X.weight_shape`. `X.weight_scale` has a scale for each output, for each
  group of inputs of an output, or for all.

  Attributes:
    specs: Name -> shape and dtype of each tensor.
  """

  def __init__(self, tensors: Tensors, config: Mapping[str, Any]):
    """Reads the shapes of packed tensors.

    Args:
      tensors: As stored.
      config: `quantization_config` of the model.

    Raises:
      UserError: A setting is not supported, or a tensor does not fit its shape and scales.
    """
    _check(config)
    self._tensors = tensors
    self.specs: dict[str, TensorSpec] = {}
    for name, spec in tensors.specs.items():
      stem, _, last = name.rpartition(".")
      if last == "weight_packed":
        self._add(stem, self._unpacked_shape(stem, spec))
      elif last == "weight" and spec.dtype in _STORED:
        self._add(stem, spec.shape)
      elif f".{last}" not in (_SCALE, _SHAPE):
        self.specs[name] = spec

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor."""
    stem = name.removesuffix(".weight")
    if name not in self._tensors.specs:
      shape = self.specs[name].shape
      values = _unpacked(self._tensors.read(stem + _PACKED), shape)
    elif self._tensors.specs[name].dtype in _STORED:
      values = self._tensors.read(name).astype(np.float32)
    else:
      return self._tensors.read(name)
    scales = self._tensors.read(stem + _SCALE).astype(np.float32)
    scales = scales.reshape(*(scales.shape if scales.ndim == 2 else (1, 1)), 1)
    return (values.reshape(len(values), scales.shape[1], -1) * scales).reshape(values.shape)

  def _unpacked_shape(self, stem: str, spec: TensorSpec) -> tuple[int, ...]:
    there = self._tensors.specs.get(stem + _SHAPE)
    if there is None or there.shape != (2,) or len(spec.shape) != 2 or spec.dtype != np.int32:
      raise UserError(f"{stem}{_PACKED} is not a packed matrix with a {stem}{_SHAPE}.")
    shape = tuple(int(size) for size in self._tensors.read(stem + _SHAPE))
    rows, words = spec.shape
    if shape[0] != rows or not any(32 * words == bits * shape[1] for bits in _BITS):
      raise UserError(f"{stem}{_PACKED} is {list(spec.shape)}, but {stem}{_SHAPE} is {shape}.")
    return shape

  def _add(self, stem: str, shape: tuple[int, ...]):
    scales = self._tensors.specs.get(stem + _SCALE)
    if scales is None:
      raise UserError(f"the tensors are quantized, but {stem}{_SCALE} is missing.")
    fits = scales.shape in ((), (1,), (1, 1)) or (
      len(scales.shape) == len(shape) == 2
      and scales.shape[0] == shape[0]
      and scales.shape[1] > 0
      and shape[1] % scales.shape[1] == 0
    )
    if len(shape) != 2 or not fits:
      raise UserError(f"{stem}{_SCALE} is {list(scales.shape)} for a matrix {list(shape)}.")
    self.specs[f"{stem}.weight"] = TensorSpec(shape, np.dtype(np.float32))


def _unpacked(words: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Returns float32 [F, D]; the first number of a word is in its lowest bits."""
  bits = 32 * words.shape[1] // shape[1]
  numbers = (words.view(np.uint32)[..., None] >> (bits * np.arange(32 // bits))) & (2**bits - 1)
  return numbers.reshape(shape).astype(np.float32) - 2 ** (bits - 1)


def _check(config: Mapping[str, Any]):
  """Raises a UserError unless the weights are dequantized by scales alone."""
  groups = config.get("config_groups")
  if not isinstance(groups, Mapping) or not groups:
    raise UserError("quantization_config lacks config_groups.")
  for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
    if config.get(key):
      raise UserError(f"quantization_config.{key} is set, which paxlike does not implement.")
  for group in groups.values():
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
      raise UserError("quantization_config: a group of config_groups lacks weights.")
    for key, wanted in (
      ("symmetric", (True,)),
      ("num_bits", _BITS),
      ("actorder", (None, "static")),  # With group, the inputs of a group are not adjacent.
    ):
      if (found := weights.get(key)) not in wanted:
        raise UserError(f"quantization_config: {key} is {found!r}, not {wanted[0]}.")
    if (form := group.get("format") or config.get("format")) not in _FORMATS:
      raise UserError(f"quantization_config: format is {form!r}; paxlike reads {_FORMATS}.")
    activations = group.get("input_activations")
    if isinstance(activations, Mapping) and not activations.get("dynamic"):
      raise UserError("quantization_config: static input_activations are not supported.")
