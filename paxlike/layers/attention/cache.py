# SPDX-License-Identifier: Apache-2.0
"""KV caches for incremental decoding.

The token at position p is in slot p modulo S, so a layer with a window needs only `window` slots.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.devices import mesh
from paxlike.layers.precision import cpu_dots


def _held_dtype(dtype: Any) -> Any:
  """Returns the dtype of caches of `dtype`: float32 on CPUs, where XLA would convert others."""
  return jnp.float32 if cpu_dots.on_cpu() else dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KvCache:
  """The cache of one attention layer.

  With this order of dims, the matmuls of a query with keys and values need no transpose.
  """

  k_BKHS: jax.Array
  v_BKSH: jax.Array

  @classmethod
  def empty(
    cls, batch: int, slots: int, heads: int, key_dim: int, value_dim: int, dtype: Any
  ) -> "KvCache":
    """Returns an empty cache."""

    def zeros(*shape: int) -> jax.Array:
      return mesh.constrain(jnp.zeros(shape, _held_dtype(dtype)), "batch", "kv_heads", None, None)

    return cls(
      k_BKHS=zeros(batch, heads, key_dim, slots), v_BKSH=zeros(batch, heads, slots, value_dim)
    )

  @property
  def num_slots(self) -> int:
    """S, the capacity in tokens."""
    return self.v_BKSH.shape[-2]

  def grown(self, num_slots: int) -> "KvCache":
    """Returns the cache with more slots; valid only while no slot has been overwritten."""
    more = num_slots - self.num_slots
    none = [(0, 0)] * (self.v_BKSH.ndim - 2)
    return KvCache(
      k_BKHS=jnp.pad(self.k_BKHS, [*none, (0, 0), (0, more)]),
      v_BKSH=jnp.pad(self.v_BKSH, [*none, (0, more), (0, 0)]),
    )

  def write(self, k_BTKH: jax.Array, v_BTKH: jax.Array, positions_BT: jax.Array) -> "KvCache":
    """Returns the cache with new tokens; those at position -1 are padding and are skipped."""
    slots_BT = _slots(positions_BT, self.num_slots)
    return KvCache(
      k_BKHS=_written(self.k_BKHS, k_BTKH, slots_BT, axis=2),
      v_BKSH=_written(self.v_BKSH, v_BTKH, slots_BT, axis=1),
    )


class KeysValues(NamedTuple):
  """What one layer attends to: keys and values of the tokens of this call, and the cache, if any.

  The cache holds these tokens already.
  """

  k_BTKH: jax.Array
  v_BTKH: jax.Array
  cache: KvCache | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentCache:
  """The cache of one latent attention layer.

  It holds one vector of width C per token, for all heads: the latent vector and the rotary key.
  """

  latents_BCS: jax.Array

  @classmethod
  def empty(cls, batch: int, slots: int, dim: int, dtype: Any) -> "LatentCache":
    """Returns an empty cache."""
    zeros = jnp.zeros((batch, dim, slots), _held_dtype(dtype))
    return cls(latents_BCS=mesh.constrain(zeros, "batch", None, None))

  @property
  def num_slots(self) -> int:
    """S, the capacity in tokens."""
    return self.latents_BCS.shape[-1]

  def grown(self, num_slots: int) -> "LatentCache":
    """See `KvCache.grown`."""
    none = [(0, 0)] * (self.latents_BCS.ndim - 1)
    more = num_slots - self.num_slots
    return LatentCache(latents_BCS=jnp.pad(self.latents_BCS, [*none, (0, more)]))

  def write(self, latents_BTC: jax.Array, positions_BT: jax.Array) -> "LatentCache":
    """See `KvCache.write`."""
    slots_BT = _slots(positions_BT, self.num_slots)
    return LatentCache(latents_BCS=_written(self.latents_BCS, latents_BTC, slots_BT, axis=1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedLatentCache:
  """The cache of one layer of sparse latent attention: latent vectors, and keys of the indexer."""

  latents: LatentCache
  index_keys: LatentCache

  @classmethod
  def empty(
    cls, batch: int, slots: int, dim: int, index_dim: int, dtype: Any
  ) -> "IndexedLatentCache":
    """Returns an empty cache."""
    return cls(
      latents=LatentCache.empty(batch, slots, dim, dtype),
      index_keys=LatentCache.empty(batch, slots, index_dim, dtype),
    )

  @property
  def num_slots(self) -> int:
    """S, the capacity in tokens."""
    return self.latents.num_slots

  def grown(self, num_slots: int) -> "IndexedLatentCache":
    """See `KvCache.grown`."""
    return IndexedLatentCache(
      latents=self.latents.grown(num_slots), index_keys=self.index_keys.grown(num_slots)
    )

  def write(
    self, latents_BTC: jax.Array, index_keys_BTH: jax.Array, positions_BT: jax.Array
  ) -> "IndexedLatentCache":
    """See `KvCache.write`."""
    return IndexedLatentCache(
      latents=self.latents.write(latents_BTC, positions_BT),
      index_keys=self.index_keys.write(index_keys_BTH, positions_BT),
    )


def positions_in(num_slots: int, positions_B1: jax.Array) -> jax.Array:
  """Returns [B, S], the position of the token in each slot after `positions_B1` are written.

  Empty slots have negative positions.
  """
  return positions_B1 - (positions_B1 - jnp.arange(num_slots)) % num_slots


def _written(cache: jax.Array, new: jax.Array, slots_BT: jax.Array, *, axis: int) -> jax.Array:
  """Returns a cache [B, ...] with new tokens [B, T, ...] in their slots, along `axis` after B.

  The batch is a dim of the scatter, not an index of it, so that a sharded one stays where it is.
  """
  # Of several devices, each may have one text.
  is_one = slots_BT.shape[1] == 1 and (len(slots_BT) == 1 or mesh.sizes_here(mesh.AXES))
  if is_one and cpu_dots.on_cpu():
    # XLA turns a scatter of one token into updates of slices, for which it copies the whole cache.
    # A scatter of two tokens stays a scatter; the second one is out of bounds, and skipped.
    new = jnp.concatenate([new, new], 1)
    slots_BT = jnp.pad(slots_BT, ((0, 0), (0, 1)), constant_values=cache.shape[1 + axis])

  def of_text(cache: jax.Array, new: jax.Array, slots_T: jax.Array) -> jax.Array:
    index = (slice(None),) * axis + (slots_T,)
    return cache.at[index].set(jnp.moveaxis(new, 0, axis), mode="drop")

  return jax.vmap(of_text)(cache, new.astype(cache.dtype), slots_BT)


def _slots(positions_BT: jax.Array, num_slots: int) -> jax.Array:
  """Returns the slot of each token; out of bounds for tokens to skip."""
  # If several new tokens have the same slot, only the last is written.
  last_B1 = positions_BT.max(axis=1, keepdims=True)
  kept = (positions_BT >= 0) & (positions_BT > last_B1 - num_slots)
  return jnp.where(kept, positions_BT % num_slots, num_slots)
