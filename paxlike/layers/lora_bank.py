# SPDX-License-Identifier: Apache-2.0
"""Adapters of several runs beside one base model, of which each sequence uses one or none."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.call_context import Context
from paxlike.layers.lora import Base, Lora


@configurable
class LoraBank(Lora):
  """`num_adapters` adapters of one rank, concatenated along the rank.

  x times all a is one matmul; of its outputs, only those of the sequence's adapter are multiplied
  by b. `Context.adapters_B` is the adapter of each sequence.
  """

  def __init__(
    self,
    inputs: Mapping[str, int],
    outputs: Mapping[str, int],
    *,
    role: str,
    rank: ranges.Size,
    num_adapters: ranges.Size,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    """`rank` is that of each adapter; scales are multiplied into b."""
    super().__init__(inputs, outputs, role=role, rank=num_adapters * rank, dtype=dtype)
    self.num_adapters = num_adapters

  def __call__(self, x: jax.Array, y: jax.Array, *, base: Base, context: Context | None):
    if context is None or context.adapters_B is None:
      return y
    a_DR, b_RF = self._matrices()
    low = x.astype(self.dtype) @ a_DR
    each = low.reshape(*low.shape[:-1], self.num_adapters, -1)
    is_used_BN = context.adapters_B[:, None] == jnp.arange(self.num_adapters)
    is_used = is_used_BN.reshape(len(x), *(1,) * (x.ndim - 2), self.num_adapters, 1)
    return y + jnp.where(is_used, each, 0).reshape(low.shape) @ b_RF

  def merged(self, w_DF: jax.Array) -> jax.Array:
    raise NotImplementedError("sequences have different adapters, so none can be merged")
