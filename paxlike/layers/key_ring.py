# SPDX-License-Identifier: Apache-2.0
"""Keys and values that travel around the devices of `context` (Liu et al., arXiv:2310.01889).

In zigzag order, a device's high queries see the low keys of any other device. Beside, its low
queries see the low keys of a device before it, and its high queries the high keys of one after it.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from paxlike.layers import blockwise
from paxlike.layers.time_order import AXIS, ZIGZAG

_LOW, _HIGH = 0, 1
Tree = TypeVar("Tree")


def forward(partial: blockwise.Partial, share: blockwise.Share) -> blockwise.Partial:
  """Returns what a device's queries have after all keys."""
  queries, keys, num_devices, mask = share

  def step(
    carry: tuple[blockwise.Partial, blockwise.Keys], distance: jax.Array
  ) -> tuple[tuple[blockwise.Partial, blockwise.Keys], None]:
    partial, keys = carry
    # Sent before what does not wait for it.
    arriving = _pass_on(keys, num_devices)
    blocks = _blocks(queries, distance, num_devices)
    return (blockwise.attend(partial, queries, keys, blocks, mask), arriving), None

  keys = _in_zigzag(keys, num_devices)
  arriving = _pass_on(keys, num_devices)
  partial = blockwise.attend(partial, queries, keys, _own_blocks(queries), mask)
  between = jnp.arange(1, num_devices - 1)
  if len(between):
    (partial, arriving), _ = jax.lax.scan(step, (partial, arriving), between)
  blocks = _blocks(queries, num_devices - 1, num_devices)
  return blockwise.attend(partial, queries, arriving, blocks, mask)


def backward(share: blockwise.Share, back: blockwise.Back) -> blockwise.Gradients:
  """Returns the gradients of a device's queries and of its own keys; these travel with the keys."""
  queries, keys, num_devices, mask = share
  keys = _in_zigzag(keys, num_devices)
  none = blockwise.no_gradients(queries, keys)

  def add(
    sums: blockwise.Gradients, keys: blockwise.Keys, distance: jax.Array | int
  ) -> blockwise.Gradients:
    arriving = _pass_on((sums.k, sums.v), num_devices)
    blocks = _blocks(queries, distance, num_devices)
    new = blockwise.attend_back(none._replace(q=sums.q), queries, keys, back, blocks, mask)
    return blockwise.Gradients(new.q, *jax.tree.map(jnp.add, arriving, (new.k, new.v)))

  def step(
    carry: tuple[blockwise.Gradients, blockwise.Keys], distance: jax.Array
  ) -> tuple[tuple[blockwise.Gradients, blockwise.Keys], None]:
    sums, keys = carry
    arriving = _pass_on(keys, num_devices)
    return (add(sums, keys, distance), arriving), None

  arriving = _pass_on(keys, num_devices)
  sums = blockwise.attend_back(none, queries, keys, back, _own_blocks(queries), mask)
  between = jnp.arange(1, num_devices - 1)
  if len(between):
    (sums, arriving), _ = jax.lax.scan(step, (sums, arriving), between)
  sums = add(sums, arriving, num_devices - 1)
  home = _pass_on((sums.k.astype(keys.k.dtype), sums.v.astype(keys.v.dtype)), num_devices)
  return blockwise.Gradients(sums.q, *(ZIGZAG.restore(x, num_devices) for x in home))


def _in_zigzag(keys: blockwise.Keys, num_devices: int) -> blockwise.Keys:
  moved = jax.tree.map(lambda x: ZIGZAG.exchange(x, num_devices), keys._replace(positions=None))
  return moved._replace(positions=ZIGZAG.positions(keys.k.shape[1], num_devices)[None])


def _pass_on(tree: Tree, num_devices: int) -> Tree:
  """Returns what the device before has."""
  to_next = [(device, (device + 1) % num_devices) for device in range(num_devices)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, to_next), tree)


def _own_blocks(queries: blockwise.Queries) -> blockwise.Blocks:
  low_and_high = jnp.array([_LOW, _HIGH, _HIGH]), jnp.array([_LOW, _HIGH, _LOW])
  return blockwise.Blocks.of_halves(queries, *low_and_high)


def _blocks(
  queries: blockwise.Queries, distance: jax.Array | int, num_devices: int
) -> blockwise.Blocks:
  """Returns the blocks of the keys of the device so far before this one, around the ring."""
  is_before = jax.lax.axis_index(AXIS) >= distance
  both = jnp.where(is_before, _LOW, _HIGH)
  return blockwise.Blocks.of_halves(queries, jnp.stack([_HIGH, both]), jnp.stack([_LOW, both]))
