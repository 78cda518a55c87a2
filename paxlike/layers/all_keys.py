# SPDX-License-Identifier: Apache-2.0
"""All keys and values, gathered from the devices of `context` (Llama 3, arXiv:2407.21783)."""

import jax
import jax.numpy as jnp

from paxlike.layers import blockwise
from paxlike.layers.time_order import AXIS, low_and_high


def forward(partial: blockwise.Partial, share: blockwise.Share) -> blockwise.Partial:
  """Returns what a device's queries, in zigzag order, have after all keys."""
  keys = _gathered(share.keys)
  return blockwise.attend(partial, share.queries, keys, _blocks(share), share.mask)


def backward(share: blockwise.Share, back: blockwise.Back) -> blockwise.Gradients:
  """Returns the gradients of a device's queries and of its own keys."""
  queries, keys = share.queries, _gathered(share.keys)
  none = blockwise.no_gradients(queries, keys)
  sums = blockwise.attend_back(none, queries, keys, back, _blocks(share), share.mask)
  own = (jax.lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) for x in (sums.k, sums.v))
  return blockwise.Gradients(sums.q, *own)


def _gathered(keys: blockwise.Keys) -> blockwise.Keys:
  return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), keys)


def _blocks(share: blockwise.Share) -> blockwise.Blocks:
  """Returns the blocks of both chunks with themselves and those before: 2C + 1 for any device."""
  low, high = low_and_high(share.num_devices)
  number = jnp.arange(2 * share.num_devices + 1)
  is_low = number <= low
  # From its own keys backwards, so that the first block shows each query one.
  chunks = jnp.where(is_low, low - number, high - (number - low - 1))
  return blockwise.Blocks.of_halves(share.queries, jnp.where(is_low, 0, 1), chunks)
