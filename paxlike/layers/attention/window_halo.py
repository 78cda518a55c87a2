# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for sliding windows: each device receives the previous device's last keys.

It applies if the window is no longer than a device's shard. Tokens stay in sequence order, in which
a window gives all devices but the first equal work.
"""

import jax
import jax.numpy as jnp

from paxlike.layers.attention import online_softmax
from paxlike.layers.attention.zigzag import AXIS

_NEVER = 2**30  # A key position that the causal mask hides from every query.


def applies(mask: online_softmax.Mask, length: int) -> bool:
  """Returns whether shards of `length` tokens need keys only of the previous device."""
  return mask.window is not None and mask.window - 1 <= length


def forward(
  accumulator: online_softmax.Accumulator, shard: online_softmax.Shard
) -> online_softmax.Accumulator:
  """Returns the accumulator of a device's queries over all keys in their windows."""
  keys, blocks = _with_halo(shard), _blocks(shard)
  return online_softmax.attend(accumulator, shard.queries, keys, blocks, shard.mask)


def backward(
  shard: online_softmax.Shard, inputs: online_softmax.BackwardInputs
) -> online_softmax.Gradients:
  """Returns the gradients of a device's queries and of its own keys."""
  queries, keys, blocks = shard.queries, _with_halo(shard), _blocks(shard)
  none = online_softmax.zero_gradients(queries, keys)
  sums = online_softmax.attend_backward(none, queries, keys, inputs, blocks, shard.mask)
  count = _halo_size(shard.mask)
  to_previous = [(device + 1, device) for device in range(shard.num_devices - 1)]

  def own(x: jax.Array) -> jax.Array:
    near, own = jnp.split(x, [count], axis=1)
    arrived = jax.lax.ppermute(near, AXIS, to_previous)
    return own.at[:, -count:].add(arrived)

  return online_softmax.Gradients(sums.q, own(sums.k), own(sums.v))


def _with_halo(shard: online_softmax.Shard) -> online_softmax.Keys:
  """Returns the previous device's last keys followed by this device's keys."""
  count = _halo_size(shard.mask)
  to_next = [(device, device + 1) for device in range(shard.num_devices - 1)]

  def join(x: jax.Array) -> jax.Array:
    near = jax.lax.ppermute(x[:, -count:], AXIS, to_next)
    return jnp.concatenate([near, x], axis=1)

  keys = jax.tree.map(join, shard.keys)
  # The first device has no previous one and receives zeros.
  is_none = (jax.lax.axis_index(AXIS) == 0) & (jnp.arange(keys.k.shape[1]) < count)
  return keys._replace(positions=jnp.where(is_none, _NEVER, keys.positions))


def _blocks(shard: online_softmax.Shard) -> online_softmax.Blocks:
  """Returns one block per piece of queries."""
  P, *_, T, _ = shard.queries.q.shape
  pieces = jnp.arange(P)
  return online_softmax.Blocks(pieces, pieces * T, T + _halo_size(shard.mask))


def _halo_size(mask: online_softmax.Mask) -> int:
  assert mask.window is not None
  return max(mask.window - 1, 1)
