# SPDX-License-Identifier: Apache-2.0
"""The last keys and values of the device before, where a window reaches no further.

Tokens stay in the order of time: with a window, all devices but the first have as much to do.
"""

import jax
import jax.numpy as jnp

from paxlike.layers import blockwise
from paxlike.layers.time_order import AXIS

_NEVER = 2**30  # A position that no query comes after.


def suffice(mask: blockwise.Mask, length: int) -> bool:
  """Returns whether devices of so many tokens each need those of one other at the most."""
  return mask.window is not None and mask.window - 1 <= length


def forward(partial: blockwise.Partial, share: blockwise.Share) -> blockwise.Partial:
  """Returns what a device's queries have after all keys in their windows."""
  keys, blocks = _with_near(share), _blocks(share)
  return blockwise.attend(partial, share.queries, keys, blocks, share.mask)


def backward(share: blockwise.Share, back: blockwise.Back) -> blockwise.Gradients:
  """Returns the gradients of a device's queries and of its own keys."""
  queries, keys, blocks = share.queries, _with_near(share), _blocks(share)
  none = blockwise.no_gradients(queries, keys)
  sums = blockwise.attend_back(none, queries, keys, back, blocks, share.mask)
  count = _num_near(share.mask)
  to_previous = [(device + 1, device) for device in range(share.num_devices - 1)]

  def own(x: jax.Array) -> jax.Array:
    near, own = jnp.split(x, [count], axis=1)
    arrived = jax.lax.ppermute(near, AXIS, to_previous)
    return own.at[:, -count:].add(arrived)

  return blockwise.Gradients(sums.q, own(sums.k), own(sums.v))


def _with_near(share: blockwise.Share) -> blockwise.Keys:
  """Returns a device's keys after the last ones of the device before."""
  count = _num_near(share.mask)
  to_next = [(device, device + 1) for device in range(share.num_devices - 1)]

  def join(x: jax.Array) -> jax.Array:
    near = jax.lax.ppermute(x[:, -count:], AXIS, to_next)
    return jnp.concatenate([near, x], axis=1)

  keys = jax.tree.map(join, share.keys)
  # The first device gets zeros.
  is_none = (jax.lax.axis_index(AXIS) == 0) & (jnp.arange(keys.k.shape[1]) < count)
  return keys._replace(positions=jnp.where(is_none, _NEVER, keys.positions))


def _blocks(share: blockwise.Share) -> blockwise.Blocks:
  """Returns one block for each piece."""
  P, *_, T, _ = share.queries.q.shape
  pieces = jnp.arange(P)
  return blockwise.Blocks(pieces, pieces * T, T + _num_near(share.mask))


def _num_near(mask: blockwise.Mask) -> int:
  assert mask.window is not None
  return max(mask.window - 1, 1)
