# SPDX-License-Identifier: Apache-2.0
"""Rules that convert arrays of other JAX programs to weights; see `checkpoints.hf_rules`.

These programs store linear maps in the shape in which they use them, as paxlike does. What differs
is the order of dims, which maps are fused, and which constants are folded into weights.
"""

import dataclasses
import math

import numpy as np

from paxlike.checkpoints.hf_rules import Same, Shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Array(Same):
  """An array, or a part of it.

  Attributes:
    part: (index, number, axis): our weight is one of `number` stacked along the dim `axis`.
    outputs_first: Whether their first dim is our last.
    joined: (start, stop): the range of our dims that they merge into one.
    pairs: Whether rotary pairs are adjacent in the last dim, instead of half of it apart.
    factor: Our weight is theirs times this,
    shift: plus this.
  """

  part: tuple[int, int, int] | None = None
  outputs_first: bool = False
  joined: tuple[int, int] | None = None
  pairs: bool = False
  factor: float = 1.0
  shift: float = 0.0

  def their_shapes(self, shape: Shape) -> list[Shape]:
    theirs = list(shape)
    if self.joined is not None:
      dims = slice(*self.joined)
      theirs[dims] = [math.prod(shape[dims])]
    if self.outputs_first:
      theirs.insert(0, theirs.pop())
    if self.part is not None:
      theirs.insert(self.part[2], self.part[1])
    return [tuple(theirs)]

  def load(self, tensors: list[np.ndarray], shape: Shape) -> np.ndarray:
    value = tensors[0]
    if self.part is not None:
      value = value.take(self.part[0], self.part[2])
    if self.outputs_first:
      value = np.moveaxis(value, 0, -1)
    value = value.reshape(shape)
    if self.pairs:
      value = np.concatenate([value[..., ::2], value[..., 1::2]], axis=-1)
    if self.factor != 1:
      value = value.astype(np.float32) * np.float32(self.factor)
    return value.astype(np.float32) + np.float32(self.shift) if self.shift else value
