# SPDX-License-Identifier: Apache-2.0
"""Keys and values of the tokens before, so that decoding computes one token at a time."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxlike import mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KvCache:
  """The cache of one attention layer; the token at position p is in slot p modulo S.

  So a layer with a window needs only as many slots as it sees tokens.
  """

  k_BSKH: jax.Array
  v_BSKH: jax.Array

  @classmethod
  def empty(cls, batch: int, slots: int, heads: int, key_dim: int, value_dim: int, dtype: Any):
    """Returns a cache without tokens."""

    def zeros(dim: int) -> jax.Array:
      return mesh.constrain(
        jnp.zeros((batch, slots, heads, dim), dtype), "batch", None, "kv_heads", None
      )

    return cls(k_BSKH=zeros(key_dim), v_BSKH=zeros(value_dim))

  def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> "KvCache":
    """Returns the cache with new tokens; those of position -1 are padding, and not written."""
    num_slots = self.k_BSKH.shape[1]
    # Of tokens that share a slot the last stays.
    last = positions_BT.max(axis=1, keepdims=True)
    kept = (positions_BT >= 0) & (positions_BT > last - num_slots)
    slots = jnp.where(kept, positions_BT % num_slots, num_slots)
    rows = jnp.arange(len(slots))[:, None]
    return KvCache(
      k_BSKH=self.k_BSKH.at[rows, slots].set(k_BTKH.astype(self.k_BSKH.dtype), mode="drop"),
      v_BSKH=self.v_BSKH.at[rows, slots].set(v_BTKH.astype(self.v_BSKH.dtype), mode="drop"),
    )

  def positions(self, positions_B1: jax.Array) -> jax.Array:
    """Returns [B, S], the position of the token in each slot once `positions_B1` are written.

    It is negative where a slot is empty.
    """
    slots = jnp.arange(self.k_BSKH.shape[1])
    return positions_B1 - (positions_B1 - slots) % self.k_BSKH.shape[1]
