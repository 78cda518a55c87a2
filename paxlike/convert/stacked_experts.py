# SPDX-License-Identifier: Apache-2.0
"""Splits tensors that stack the matrices of all experts into one tensor for each matrix."""

import re
from collections.abc import Mapping

import numpy as np

from paxlike.convert.quantized import Tensors
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.errors import UserError

_MOST_EXPERTS = 2**16


class UnstackedExperts:
  """The tensors of a folder, with `X.experts.gate_up_proj` as `X.experts.0.gate_proj.weight`, ...

  Attributes:
    specs: Name -> shape and dtype of each tensor.
  """

  def __init__(self, tensors: Tensors, stacked: Mapping[str, tuple[str, ...]]):
    """Reads no tensor.

    Args:
      tensors: As stored.
      stacked: See `Family.stacked_experts`.

    Raises:
      UserError: A tensor of experts has an unsupported shape.
    """
    self._tensors = tensors
    self.specs: dict[str, TensorSpec] = {}
    self._places: dict[str, tuple[str, int, slice]] = {}
    for name, spec in tensors.specs.items():
      ending = next((e for e in stacked if re.search(rf"(^|\.){re.escape(e)}$", name)), None)
      if ending is None:
        self.specs[name] = spec
        continue
      parts = stacked[ending]
      is_3d = len(spec.shape) == 3 and 0 not in spec.shape
      if not is_3d or spec.shape[0] > _MOST_EXPERTS or spec.shape[1] % len(parts):
        raise UserError(f"{name} is {list(spec.shape)}, not matrices of {' and '.join(parts)}.")
      experts, rows, columns = spec.shape
      size, stem = rows // len(parts), name.rpartition(".")[0]
      for expert in range(experts):
        for index, part in enumerate(parts):
          own = f"{stem}.{expert}.{part}.weight"
          self.specs[own] = TensorSpec((size, columns), spec.dtype)
          self._places[own] = name, expert, slice(index * size, (index + 1) * size)

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor."""
    if name not in self._places:
      return self._tensors.read(name)
    stored, expert, rows = self._places[name]
    return self._tensors.read(stored)[expert, rows]
