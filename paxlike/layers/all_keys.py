# SPDX-License-Identifier: Apache-2.0
"""All keys and values, gathered from the devices of `context` (Llama 3, arXiv:2407.21783)."""

import jax
import jax.numpy as jnp

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
from paxlike.layers.time_order import AXIS, low_and_high


def forward(
  partial: Partial, queries: Queries, keys: Keys, num_devices: int, mask: Mask
) -> Partial:
  """Returns what a device's queries, in zigzag order, have after all keys; `keys` are its own."""
  return attend(partial, queries, _gathered(keys), _blocks(queries, num_devices), mask)


def backward(queries: Queries, back: Back, keys: Keys, num_devices: int, mask: Mask) -> Gradients:
  """Returns the gradients of a device's queries and of its own keys."""
  keys = _gathered(keys)
  blocks = _blocks(queries, num_devices)
  sums = attend_back(no_gradients(queries, keys), queries, keys, back, blocks, mask)
  own = (jax.lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) for x in (sums.k, sums.v))
  return Gradients(sums.q, *own)


def _gathered(keys: Keys) -> Keys:
  return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), keys)


def _blocks(queries: Queries, num_devices: int) -> Blocks:
  """Returns the blocks of both chunks with themselves and those before: 2C + 1 for any device."""
  low, high = low_and_high(num_devices)
  number = jnp.arange(2 * num_devices + 1)
  is_low = number <= low
  # From its own keys backwards, so that the first block shows each query one.
  chunks = jnp.where(is_low, low - number, high - (number - low - 1))
  return Blocks.of_halves(queries, jnp.where(is_low, 0, 1), chunks)
