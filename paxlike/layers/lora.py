# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation of linear maps (Hu et al., 2021, arXiv:2106.09685)."""

import math
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers import module
from paxlike.layers.call_context import Context
from paxlike.layers.dropout import Dropout

# A regular expression that matches the names of LoRA weights.
WEIGHTS = r"(^|\.)lora\."


@configurable
class Lora(module.Module):
  """The low-rank update scale * x a b that a linear map adds to its output.

  Attributes:
    scale: Multiplier of the update (alpha / rank).
    dtype: The dtype of the matmuls.
  """

  def __init__(
    self,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    rank: ranges.Size,
    scale: ranges.Finite = 1.0,
    dropout: Callable[[], Dropout] | None = None,
    init: module.Initializer = module.gaussian_fan_in,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    self.num_inputs = len(inputs)
    self.scale = scale
    self.dtype = dtype
    self.dropout = None if dropout is None else dropout()
    self._key = zlib.crc32(role.encode())
    low_rank = {"adapter": rank}
    num_inputs, num_outputs = (math.prod(dims.values()) for dims in (inputs, outputs))
    self.a = self.weight(
      {**inputs, **low_rank},
      init=init,
      fan_in=tuple(inputs),
      matmul=module.Matmul(num_inputs, rank),
      compute_dtype=dtype,
    )
    self.b = self.weight(
      {**low_rank, **outputs},
      init=module.zeros,
      matmul=module.Matmul(rank, num_outputs),
      compute_dtype=dtype,
    )

  def __call__(self, x: jax.Array, context: Context | None) -> jax.Array:
    """Returns [..., F] for x [..., D], where D and F are the flattened inputs and outputs."""
    if self.dropout is not None and context is not None:
      x = self.dropout(x, context.fold(self._key))
    a_DR, b_RF = self._matrices()
    return (x.astype(self.dtype) @ a_DR) @ b_RF * self.scale

  def matrix(self) -> jax.Array:
    """Returns scale * a b, the update to merge into the weight: [D, F] in the compute dtype."""
    a_DR, b_RF = self._matrices()
    return a_DR @ b_RF * self.scale

  def _matrices(self) -> tuple[jax.Array, jax.Array]:
    a, b = self.a[...].astype(self.dtype), self.b[...].astype(self.dtype)
    return a.reshape(math.prod(a.shape[:-1]), -1), b.reshape(b.shape[0], -1)
