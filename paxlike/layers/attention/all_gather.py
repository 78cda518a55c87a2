# SPDX-License-Identifier: Apache-2.0
"""Context parallelism that all-gathers keys and values (Llama 3, arXiv:2407.21783)."""

import jax
import jax.numpy as jnp

from paxlike.layers.attention import online_softmax
from paxlike.layers.attention.zigzag import AXIS, low_and_high


def forward(
  accumulator: online_softmax.Accumulator, shard: online_softmax.Shard
) -> online_softmax.Accumulator:
  """Returns the accumulator of a device's queries, in zigzag order, over all keys."""
  keys = _gathered(shard.keys)
  return online_softmax.attend(accumulator, shard.queries, keys, _blocks(shard), shard.mask)


def backward(
  shard: online_softmax.Shard, inputs: online_softmax.BackwardInputs
) -> online_softmax.Gradients:
  """Returns the gradients of a device's queries and of its own keys."""
  queries, keys = shard.queries, _gathered(shard.keys)
  none = online_softmax.zero_gradients(queries, keys)
  sums = online_softmax.attend_backward(none, queries, keys, inputs, _blocks(shard), shard.mask)
  own = (jax.lax.psum_scatter(x, AXIS, scatter_dimension=1, tiled=True) for x in (sums.k, sums.v))
  return online_softmax.Gradients(sums.q, *own)


def _gathered(keys: online_softmax.Keys) -> online_softmax.Keys:
  return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, axis=1, tiled=True), keys)


def _blocks(shard: online_softmax.Shard) -> online_softmax.Blocks:
  """Returns the causal blocks of the low and the high chunk: 2C + 1 on every device."""
  low, high = low_and_high(shard.num_devices)
  number = jnp.arange(2 * shard.num_devices + 1)
  is_low = number <= low
  # Each chunk's own keys come first: `attend` needs a visible key for each query in that block.
  chunks = jnp.where(is_low, low - number, high - (number - low - 1))
  return online_softmax.Blocks.of_halves(shard.queries, jnp.where(is_low, 0, 1), chunks)
