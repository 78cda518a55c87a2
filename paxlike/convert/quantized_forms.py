# SPDX-License-Identifier: Apache-2.0
"""Exports weight-only quantized models as safetensors.

`Compressed` is the format of compressed-tensors, which vLLM reads; `Fp8` is that of DeepSeek's and
Qwen's published FP8 models. The linear maps of layers are quantized, by the rules of
quantization-aware training.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from paxlike.convert import safetensors_files
from paxlike.convert.exported_form import write_config
from paxlike.convert.quantized import Tensors
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError
from paxlike.layers.precision import quantization_aware
from paxlike.layers.precision.quantization_aware import Rule

_WEIGHT = ".weight"
# Without `eh_proj` of multi-token prediction and `weights_proj` of indexers, which are not
# quantized in training, either.
_LINEAR = re.compile(
  r".*\blayers\.\d+\.(?!eh_proj|.*\.weights_proj\.)"
  r".*(_proj(_with_mqa)?|\.indexer\.(wk|wq_b))\.weight"
)
_LAYER = re.compile(r".*\blayers\.\d+\..*")


class _Form:
  """Safetensors in which each matrix of `_LINEAR` is replaced by several tensors."""

  reads_compute_dtype = True

  def __init__(self, name: str, rule: Rule):
    self.name = name
    self.rule = rule

  def check(self, specs: Mapping[str, TensorSpec], config: Mapping[str, Any]):
    del config
    for name, spec in specs.items():
      if _LAYER.fullmatch(name) and len(spec.shape) > 2:
        kind = "a convolution" if "conv" in name else "a stack of matrices"
        raise UserError(
          f"--to_format={self.name} has no place for {name}, {kind}: use --to_format=hf."
        )
      if _LAYER.fullmatch(name) and "experts" in name and not _LINEAR.fullmatch(name):
        raise UserError(f"--to_format={self.name} has no place for {name}: use --to_format=hf.")
    if not (matrices := [name for name in specs if _LINEAR.fullmatch(name)]):
      raise UserError(
        f"--to_format={self.name} quantizes linear maps named *_proj, of which this model has none:"
        " use --to_format=hf."
      )
    for name in matrices:
      self.check_matrix(name, specs[name].shape)

  def check_matrix(self, name: str, shape: tuple[int, ...]):
    """Raises a UserError if a matrix of this shape cannot be quantized."""

  def parts(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """Returns the tensors that replace a matrix."""
    raise NotImplementedError

  def quantized(self, name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the values of `parts`, for a matrix [outputs, inputs]."""
    raise NotImplementedError

  def settings(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Returns the `quantization_config` of a model."""
    raise NotImplementedError

  def write(self, folder: pathlib.Path, tensors: Tensors, config: Mapping[str, Any]):
    specs: dict[str, TensorSpec] = {}
    sources: dict[str, str] = {}
    for name, spec in tensors.specs.items():
      parts = self.parts(name, spec) if _LINEAR.fullmatch(name) else {name: spec}
      specs |= parts
      sources |= dict.fromkeys(parts, name)
    made: dict[str, np.ndarray] = {}  # The parts of one matrix.

    def value(name: str) -> np.ndarray:
      source = sources[name]
      if not _LINEAR.fullmatch(source):
        return tensors.read(source)
      if name not in made:
        made.clear()
        made.update(self.quantized(source, tensors.read(source)))
      return made[name]

    safetensors_files.write(folder, specs, value)
    write_config(folder, {**config, "quantization_config": self.settings(tensors.specs)})

  def _rounded(self, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values and scales of a matrix [outputs, inputs], transposed likewise."""
    values, scales = quantization_aware.rounded(self.rule, np.asarray(matrix).T)
    return np.asarray(values).T, np.asarray(scales).T


class Compressed(_Form):
  """The format of compressed-tensors: integers packed into int32, or FP8, with scales by output."""

  def __init__(self, name: str, rule: str):
    super().__init__(name, getattr(quantization_aware, rule))

  @property
  def _integers(self) -> quantization_aware.Integers | None:
    return self.rule if isinstance(self.rule, quantization_aware.Integers) else None

  def check_matrix(self, name: str, shape: tuple[int, ...]):
    if (integers := self._integers) is None:
      return
    multiple = integers.group or 32 // integers.bits
    if shape[1] % multiple:
      raise UserError(
        f"--to_format={self.name} has groups of {multiple} weights, but {name} is {list(shape)}:"
        " use --to_format=compressed_fp8."
      )

  def parts(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    rows, columns = spec.shape
    stem = name.removesuffix(_WEIGHT)
    if (integers := self._integers) is None:
      return {
        name: TensorSpec(spec.shape, np.dtype(ml_dtypes.float8_e4m3fn)),
        f"{stem}.weight_scale": TensorSpec((rows, 1), np.dtype(np.float32)),
      }
    groups = columns // (integers.group or columns)
    return {
      f"{stem}.weight_packed": TensorSpec((rows, columns * integers.bits // 32), np.dtype("int32")),
      f"{stem}.weight_scale": TensorSpec((rows, groups), spec.dtype),
      f"{stem}.weight_shape": TensorSpec((2,), np.dtype(np.int64)),
    }

  def quantized(self, name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    stem = name.removesuffix(_WEIGHT)
    values, scales = self._rounded(matrix)
    if (integers := self._integers) is None:
      return {name: values, f"{stem}.weight_scale": scales}
    return {
      f"{stem}.weight_packed": _packed(values, integers.bits),
      f"{stem}.weight_scale": scales,
      f"{stem}.weight_shape": np.array(matrix.shape, np.int64),
    }

  def settings(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    integers = self._integers
    weights: dict[str, Any] = {
      "num_bits": 8 if integers is None else integers.bits,
      "type": "float" if integers is None else "int",
      "symmetric": True,
      "strategy": "group" if integers is not None and integers.group else "channel",
      "group_size": None if integers is None else integers.group,
      "dynamic": False,
    }
    form = "float-quantized" if integers is None else "pack-quantized"
    group = {
      "targets": ["Linear"],
      "weights": weights,
      "input_activations": None,
      "output_activations": None,
      "format": form,
    }
    return {
      "quant_method": "compressed-tensors",
      "quantization_status": "compressed",
      "format": form,
      "config_groups": {"group_0": group},
      "ignore": _others(specs),
      "kv_cache_scheme": None,
      "global_compression_ratio": None,
    }


class Fp8(_Form):
  """DeepSeek's format: FP8 (E4M3), with `X_scale_inv` of blocks of 128 x 128 of each matrix X."""

  def __init__(self, name: str):
    super().__init__(name, quantization_aware.FP8_BLOCKS)

  def parts(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    block = quantization_aware.FP8_BLOCK
    blocks = tuple(-(-size // block) for size in spec.shape)
    return {
      name: TensorSpec(spec.shape, np.dtype(ml_dtypes.float8_e4m3fn)),
      f"{name}_scale_inv": TensorSpec(blocks, np.dtype(np.float32)),
    }

  def quantized(self, name: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    values, scales = self._rounded(matrix)
    return {name: values, f"{name}_scale_inv": scales}

  def settings(self, specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    block = quantization_aware.FP8_BLOCK
    return {
      "quant_method": "fp8",
      "activation_scheme": "dynamic",
      "fmt": "e4m3",
      "weight_block_size": [block, block],
      "modules_to_not_convert": _others(specs),
    }


def _others(specs: Mapping[str, TensorSpec]) -> list[str]:
  """Returns the modules with a matrix that is not quantized."""
  matrices = (name for name, spec in specs.items() if len(spec.shape) == 2)
  modules = [n.removesuffix(_WEIGHT) for n in matrices if not _LINEAR.fullmatch(n)]
  return list(dict.fromkeys([*modules, "lm_head"]))  # Also of tied embeddings.


def _packed(values: np.ndarray, bits: int) -> np.ndarray:
  """Returns int8 [F, D] packed into int32 [F, D * bits / 32], the first value lowest."""
  count = 32 // bits
  numbers = (values.astype(np.int64) + 2 ** (bits - 1)).reshape(len(values), -1, count)
  words = (numbers << (bits * np.arange(count))).sum(-1)
  return words.astype(np.uint32).view(np.int32)
