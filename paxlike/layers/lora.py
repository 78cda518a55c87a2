# SPDX-License-Identifier: Apache-2.0
"""Low-rank adaptation of linear maps (Hu et al., 2021, arXiv:2106.09685)."""

import math
import zlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.layers import module
from paxlike.layers.context import Context
from paxlike.layers.dropout import Dropout

# What the names of an adapter's weights have in common.
WEIGHTS = r"(^|\.)lora\."


@configurable
class Lora(module.Module):
  """What is added to a linear map: x a b, through `rank` dims.

  Attributes:
    scale: Of what is added.
    dtype: As of `Linear`.
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
    through = {"adapter": rank}
    self.a = self.weight(
      {**inputs, **through}, init=init, fan_in=tuple(inputs), compute_dtype=dtype
    )
    self.b = self.weight({**through, **outputs}, init=module.zeros, compute_dtype=dtype)

  def __call__(self, x: jax.Array, context: Context | None) -> jax.Array:
    """Returns [..., F] for x [..., D], inputs and outputs each as one dim."""
    if self.dropout is not None and context is not None:
      x = self.dropout(x, context.fold(self._key))
    a_DR, b_RF = self._matrices()
    return (x.astype(self.dtype) @ a_DR) @ b_RF * self.scale

  def matrix(self) -> jax.Array:
    """Returns what may be added to the map's own matrix instead, [D, F] in the compute dtype."""
    a_DR, b_RF = self._matrices()
    return a_DR @ b_RF * self.scale

  def _matrices(self) -> tuple[jax.Array, jax.Array]:
    a, b = self.a[...].astype(self.dtype), self.b[...].astype(self.dtype)
    return a.reshape(math.prod(a.shape[:-1]), -1), b.reshape(b.shape[0], -1)
