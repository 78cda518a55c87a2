# SPDX-License-Identifier: Apache-2.0
"""The arrays of a checkpoint, those of scanned layers split into one for each layer."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paxlike.config import ranges
from paxlike.convert.safetensors_files import TensorSpec
from paxlike.convert.tensorstore_arrays import TensorStoreArrays
from paxlike.errors import UserError

# A stacked array is read in blocks of layers of this size, or of one layer if that is larger.
# Reading a block passes over all chunks that hold a part of it, which usually hold all layers.
_BLOCK_BYTES = 2_000_000_000


class Layers(NamedTuple):
  """The layers that an array holds.

  The layers are numbered in groups of equal size, such as one local and one global layer of
  Gemma 2.

  Attributes:
    name: The name for one layer, `{}` for its index.
    member: The index in each group.
    group: The group; None: all groups, stacked along `axis`; -1: the one after the stacked ones.
    axis: The stacked dim, if `group` is None.
  """

  name: str
  member: int = 0
  group: int | None = None
  axis: int = 0


class _Place(NamedTuple):
  array: str
  axis: int
  index: int | None


class LayeredArrays:
  """The arrays by name, `specs` and `read` as of `quantized.Tensors`.

  Attributes:
    specs: Name -> shape and dtype.
    path: The folder.
    num_layers: The number of layers.
  """

  def __init__(self, arrays: TensorStoreArrays, layers: Callable[[str], Layers | None]):
    """`layers` returns the layers that an array holds; None if it is not part of a layer.

    Raises:
      UserError: Two arrays hold the same layer, or there are too many layers.
    """
    self._arrays, self.path = arrays, arrays.path
    self._block: tuple[str, int, np.ndarray] | None = None  # (array, first layer, values)
    self.specs: dict[str, TensorSpec] = {}
    self._places: dict[str, _Place] = {}
    found = {name: layers(name) for name in arrays.specs}
    kinds = [held for held in found.values() if held is not None]
    size = max((held.member + 1 for held in kinds if held.group != -1), default=1)
    groups = max(
      (self._num_groups(name, held) for name, held in found.items() if held is not None), default=0
    )
    highest = -1
    for name, held in found.items():
      if held is None:
        self._add(name, _Place(name, 0, None), arrays.specs[name])
        continue
      shape, dtype = arrays.specs[name]
      if held.group is not None:
        layer = (groups if held.group == -1 else held.group) * size + held.member
        self._add(held.name.format(layer), _Place(name, 0, None), arrays.specs[name])
        highest = max(highest, layer)
        continue
      one = TensorSpec((*shape[: held.axis], *shape[held.axis + 1 :]), dtype)
      for group in range(shape[held.axis]):
        layer = group * size + held.member
        self._add(held.name.format(layer), _Place(name, held.axis, group), one)
        highest = max(highest, layer)
    self.num_layers = highest + 1

  def _num_groups(self, name: str, held: Layers) -> int:
    shape = self._arrays.specs[name].shape
    if held.group is not None:
      count = held.group + 1
    elif held.axis < len(shape):
      count = shape[held.axis]
    else:
      raise UserError(f"{self._arrays.path}: {name} is {list(shape)}: it has no dim of layers.")
    if count * (held.member + 1) > ranges.MOST_LAYERS:
      raise UserError(f"{self._arrays.path}: {name} has {count:,} layers: too many.")
    return count

  def _add(self, name: str, place: _Place, spec: TensorSpec):
    if name in self.specs:
      first = self._places[name].array
      raise UserError(f"{self._arrays.path}: {first} and {place.array} hold the same layer.")
    self.specs[name], self._places[name] = spec, place

  def order(self, name: str) -> tuple[str, int]:
    """Returns a sort key: in its order, the layers of one array are read together."""
    array, _, index = self._places[name]
    return array, -1 if index is None else index

  def read(self, name: str) -> np.ndarray:
    """Returns a layer's array. Reads of the layers of one array should follow each other.

    Raises:
      UserError: Its data are missing or damaged.
    """
    array, axis, index = self._places[name]
    if index is None:
      return self._arrays.read(array)
    if self._block is None or self._block[0] != array or not self._has(axis, index):
      self._block = None  # Freed before the next one is read.
      spec = self.specs[name]
      count = max(1, _BLOCK_BYTES // max(1, math.prod(spec.shape) * spec.dtype.itemsize))
      stop = min(index + count, self._arrays.specs[array].shape[axis])
      part = (*[slice(None)] * axis, slice(index, stop))
      self._block = array, index, self._arrays.read(array, part)
    _, first, values = self._block
    return values.take(index - first, axis)

  def _has(self, axis: int, index: int) -> bool:
    assert self._block is not None
    _, first, values = self._block
    return first <= index < first + values.shape[axis]
