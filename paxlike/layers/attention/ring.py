# SPDX-License-Identifier: Apache-2.0
"""Ring attention: keys and values rotate around the axis `context` (Liu et al., arXiv:2310.01889).

In zigzag order, a device's queries attend to another device's keys in two causal blocks: its high
queries to the low keys, and either low to low (keys of a device with a lower index) or high to high
(of a higher one).
"""

from typing import TypeVar

import jax
import jax.numpy as jnp

from paxlike.layers.attention import online_softmax
from paxlike.layers.attention.zigzag import AXIS, ZIGZAG

_LOW, _HIGH = 0, 1
Tree = TypeVar("Tree")


def forward(
  accumulator: online_softmax.Accumulator, shard: online_softmax.Shard
) -> online_softmax.Accumulator:
  """Returns the accumulator of a device's queries over all keys."""
  queries, keys, num_devices, mask = shard

  def step(
    carry: tuple[online_softmax.Accumulator, online_softmax.Keys], distance: jax.Array
  ) -> tuple[tuple[online_softmax.Accumulator, online_softmax.Keys], None]:
    accumulator, keys = carry
    # Sent before attention, so that transfer and compute overlap.
    arriving = _rotate(keys, num_devices)
    blocks = _blocks(queries, distance, num_devices)
    return (online_softmax.attend(accumulator, queries, keys, blocks, mask), arriving), None

  keys = _in_zigzag(keys, num_devices)
  arriving = _rotate(keys, num_devices)
  accumulator = online_softmax.attend(accumulator, queries, keys, _own_blocks(queries), mask)
  between = jnp.arange(1, num_devices - 1)
  if len(between):
    (accumulator, arriving), _ = jax.lax.scan(step, (accumulator, arriving), between)
  blocks = _blocks(queries, num_devices - 1, num_devices)
  return online_softmax.attend(accumulator, queries, arriving, blocks, mask)


def backward(
  shard: online_softmax.Shard, inputs: online_softmax.BackwardInputs
) -> online_softmax.Gradients:
  """Returns the gradients of a device's queries and keys; those of keys rotate with the keys."""
  queries, keys, num_devices, mask = shard
  keys = _in_zigzag(keys, num_devices)
  none = online_softmax.zero_gradients(queries, keys)

  def add(
    sums: online_softmax.Gradients, keys: online_softmax.Keys, distance: jax.Array | int
  ) -> online_softmax.Gradients:
    arriving = _rotate((sums.k, sums.v), num_devices)
    blocks = _blocks(queries, distance, num_devices)
    new = online_softmax.attend_backward(
      none._replace(q=sums.q), queries, keys, inputs, blocks, mask
    )
    return online_softmax.Gradients(new.q, *jax.tree.map(jnp.add, arriving, (new.k, new.v)))

  def step(
    carry: tuple[online_softmax.Gradients, online_softmax.Keys], distance: jax.Array
  ) -> tuple[tuple[online_softmax.Gradients, online_softmax.Keys], None]:
    sums, keys = carry
    arriving = _rotate(keys, num_devices)
    return (add(sums, keys, distance), arriving), None

  arriving = _rotate(keys, num_devices)
  sums = online_softmax.attend_backward(none, queries, keys, inputs, _own_blocks(queries), mask)
  between = jnp.arange(1, num_devices - 1)
  if len(between):
    (sums, arriving), _ = jax.lax.scan(step, (sums, arriving), between)
  sums = add(sums, arriving, num_devices - 1)
  home = _rotate((sums.k.astype(keys.k.dtype), sums.v.astype(keys.v.dtype)), num_devices)
  return online_softmax.Gradients(sums.q, *(ZIGZAG.restore(x, num_devices) for x in home))


def _in_zigzag(keys: online_softmax.Keys, num_devices: int) -> online_softmax.Keys:
  moved = jax.tree.map(lambda x: ZIGZAG.exchange(x, num_devices), keys._replace(positions=None))
  return moved._replace(positions=ZIGZAG.positions(keys.k.shape[1], num_devices)[None])


def _rotate(tree: Tree, num_devices: int) -> Tree:
  """Sends a pytree to the next device and returns that of the previous device."""
  to_next = [(device, (device + 1) % num_devices) for device in range(num_devices)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, AXIS, to_next), tree)


def _own_blocks(queries: online_softmax.Queries) -> online_softmax.Blocks:
  low_and_high = jnp.array([_LOW, _HIGH, _HIGH]), jnp.array([_LOW, _HIGH, _LOW])
  return online_softmax.Blocks.of_halves(queries, *low_and_high)


def _blocks(
  queries: online_softmax.Queries, distance: jax.Array | int, num_devices: int
) -> online_softmax.Blocks:
  """Returns the blocks with the keys of the device `distance` steps back in the ring."""
  is_before = jax.lax.axis_index(AXIS) >= distance
  both = jnp.where(is_before, _LOW, _HIGH)
  return online_softmax.Blocks.of_halves(queries, jnp.stack([_HIGH, both]), jnp.stack([_LOW, both]))
