# SPDX-License-Identifier: Apache-2.0
"""All keys and values, gathered from the devices of `context` (Llama 3, arXiv:2407.21783, 3.3.2).

Shapes: [B, S, K, H] and [B, S], a device's contiguous share.
"""

import jax
import jax.numpy as jnp

from paxlike.layers import zigzag
from paxlike.layers.blockwise import (
  Back,
  Blocks,
  Gradients,
  Keys,
  Mask,
  Partial,
  Queries,
  attend,
  attend_back,
  no_gradients,
)


def forward(
  partial: Partial,
  queries: Queries,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  num_devices: int,
  mask: Mask,
) -> Partial:
  """Returns what a device's queries have after all keys."""
  keys = _keys(k, v, segments)
  return attend(partial, queries, keys, _blocks(queries, num_devices), mask)


def backward(
  queries: Queries,
  back: Back,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  num_devices: int,
  mask: Mask,
) -> Gradients:
  """Returns the gradients of a device's queries, and of its own k and v."""
  keys = _keys(k, v, segments)
  none, blocks = no_gradients(queries, keys), _blocks(queries, num_devices)
  sums = attend_back(none, queries, keys, back, blocks, mask)

  def own(x: jax.Array) -> jax.Array:
    x = jax.lax.psum_scatter(x, zigzag.AXIS, scatter_dimension=0, tiled=True)
    return jnp.concatenate(list(x), axis=1)

  return Gradients(sums.q, own(sums.k), own(sums.v))


def _keys(k: jax.Array, v: jax.Array, segments: jax.Array | None) -> Keys:
  """Returns all chunks."""

  def gather(x: jax.Array) -> jax.Array:
    halves = jnp.moveaxis(x.reshape(len(x), 2, -1, *x.shape[2:]), 1, 0)
    return jax.lax.all_gather(halves, zigzag.AXIS, axis=0, tiled=True)

  k, v = gather(k), gather(v)
  segments = None if segments is None else gather(segments)
  return Keys(k, v, segments, jnp.arange(len(k)) * k.shape[2])


def _blocks(queries: Queries, num_devices: int) -> Blocks:
  """Returns the blocks of the low and of the high chunk that it does not see after: 2C + 1."""
  low, high = zigzag.chunks_of(jax.lax.axis_index(zigzag.AXIS), num_devices)
  number = jnp.arange(2 * num_devices + 1)
  is_low = number <= low
  # From a chunk's own keys backwards, so that the first block shows each query one.
  chunks = jnp.where(is_low, low - number, high - (number - low - 1))
  return Blocks.of(queries, jnp.where(is_low, 0, 1), chunks)
