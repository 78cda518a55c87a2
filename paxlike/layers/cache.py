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

  So a layer with a window needs only as many slots as it sees tokens. Dims are in the order in
  which a query meets them: its products with keys and with values then need no transpose.
  """

  k_BKHS: jax.Array
  v_BKSH: jax.Array

  @classmethod
  def empty(
    cls, batch: int, slots: int, heads: int, key_dim: int, value_dim: int, dtype: Any
  ) -> "KvCache":
    """Returns a cache without tokens."""

    def zeros(*shape: int) -> jax.Array:
      return mesh.constrain(jnp.zeros(shape, dtype), "batch", "kv_heads", None, None)

    return cls(
      k_BKHS=zeros(batch, heads, key_dim, slots), v_BKSH=zeros(batch, heads, slots, value_dim)
    )

  @property
  def num_slots(self) -> int:
    """S, the number of tokens that it can hold."""
    return self.v_BKSH.shape[-2]

  def grown(self, num_slots: int) -> "KvCache":
    """Returns the cache with more slots; right as long as no token has taken another's slot."""
    more = num_slots - self.num_slots
    none = [(0, 0)] * (self.v_BKSH.ndim - 2)
    return KvCache(
      k_BKHS=jnp.pad(self.k_BKHS, [*none, (0, 0), (0, more)]),
      v_BKSH=jnp.pad(self.v_BKSH, [*none, (0, more), (0, 0)]),
    )

  def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> "KvCache":
    """Returns the cache with new tokens; those of position -1 are padding, and not written."""
    num_slots = self.num_slots
    # Of tokens that share a slot the last stays.
    last_B1 = positions_BT.max(axis=1, keepdims=True)
    kept = (positions_BT >= 0) & (positions_BT > last_B1 - num_slots)
    slots_BT = jnp.where(kept, positions_BT % num_slots, num_slots)
    rows_B1 = jnp.arange(len(slots_BT))[:, None]
    k_BTKH, v_BTKH = k_BTKH.astype(self.k_BKHS.dtype), v_BTKH.astype(self.v_BKSH.dtype)
    return KvCache(
      k_BKHS=self.k_BKHS.at[rows_B1, :, :, slots_BT].set(k_BTKH, mode="drop"),
      v_BKSH=self.v_BKSH.at[rows_B1, :, slots_BT].set(v_BTKH, mode="drop"),
    )

  def positions(self, positions_B1: jax.Array) -> jax.Array:
    """Returns [B, S], the position of the token in each slot once `positions_B1` are written.

    It is negative where a slot is empty.
    """
    slots = jnp.arange(self.num_slots)
    return positions_B1 - (positions_B1 - slots) % self.num_slots
