# SPDX-License-Identifier: Apache-2.0
"""Keys and values that travel around the devices of `context` (Liu et al., arXiv:2310.01889).

A device meets the chunks of device j in zigzag order: its high queries see j's low keys. Of the
pairs of like chunks, its low queries see j's low keys if j comes before it, else its high queries
see j's high keys. Shapes: [B, S, K, H] and [B, S], a device's contiguous share.
"""

from typing import TypeVar

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

_LOW, _HIGH = 0, 1
Tree = TypeVar("Tree")


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
  keys = _keys(k, v, segments, num_devices)
  arriving = _pass_on(keys, num_devices)
  partial = attend(partial, queries, keys, _own_blocks(queries), mask)

  def step(carry: tuple[Partial, Keys], distance: jax.Array) -> tuple[tuple[Partial, Keys], None]:
    partial, keys = carry
    # Named before what it does not wait for.
    arriving = _pass_on(keys, num_devices)
    blocks = _blocks(queries, distance, num_devices)
    return (attend(partial, queries, keys, blocks, mask), arriving), None

  if num_devices > 2:
    between = jnp.arange(1, num_devices - 1)
    (partial, arriving), _ = jax.lax.scan(step, (partial, arriving), between)
  blocks = _blocks(queries, num_devices - 1, num_devices)
  return attend(partial, queries, arriving, blocks, mask)


def backward(
  queries: Queries,
  back: Back,
  k: jax.Array,
  v: jax.Array,
  segments: jax.Array | None,
  num_devices: int,
  mask: Mask,
) -> Gradients:
  """Returns the gradients of a device's queries, and of its own k and v, whose travel with them."""
  keys = _keys(k, v, segments, num_devices)
  arriving = _pass_on(keys, num_devices)
  none = no_gradients(queries, keys)
  sums = attend_back(none, queries, keys, back, _own_blocks(queries), mask)

  def add(sums: Gradients, keys: Keys, distance: jax.Array | int) -> Gradients:
    of_keys = _pass_on((sums.k, sums.v), num_devices)
    blocks = _blocks(queries, distance, num_devices)
    new = attend_back(none._replace(q=sums.q), queries, keys, back, blocks, mask)
    # Added last: meanwhile they are on their way.
    return Gradients(new.q, *jax.tree.map(jnp.add, of_keys, (new.k, new.v)))

  def step(
    carry: tuple[Gradients, Keys], distance: jax.Array
  ) -> tuple[tuple[Gradients, Keys], None]:
    sums, keys = carry
    arriving = _pass_on(keys, num_devices)
    return (add(sums, keys, distance), arriving), None

  if num_devices > 2:
    between = jnp.arange(1, num_devices - 1)
    (sums, arriving), _ = jax.lax.scan(step, (sums, arriving), between)
  sums = add(sums, arriving, num_devices - 1)
  home = _pass_on((sums.k, sums.v), num_devices)
  return Gradients(sums.q, *(zigzag.restore(x, num_devices) for x in home))


def _keys(k: jax.Array, v: jax.Array, segments: jax.Array | None, num_devices: int) -> Keys:
  """Returns a device's own two chunks."""
  k, v = (zigzag.exchange(x, num_devices) for x in (k, v))
  segments = None if segments is None else zigzag.exchange(segments, num_devices)
  chunks = zigzag.chunks_of(jax.lax.axis_index(zigzag.AXIS), num_devices)
  return Keys(k, v, segments, chunks * k.shape[2])


def _pass_on(tree: Tree, num_devices: int) -> Tree:
  """Returns what the device before has."""
  to_next = [(device, (device + 1) % num_devices) for device in range(num_devices)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, zigzag.AXIS, to_next), tree)


def _own_blocks(queries: Queries) -> Blocks:
  return Blocks.of(queries, jnp.array([_LOW, _HIGH, _HIGH]), jnp.array([_LOW, _HIGH, _LOW]))


def _blocks(queries: Queries, distance: jax.Array | int, num_devices: int) -> Blocks:
  """Returns which blocks there are with the chunks of the device so far before this one."""
  device = jax.lax.axis_index(zigzag.AXIS)
  like = jnp.where((device - distance) % num_devices < device, _LOW, _HIGH)
  return Blocks.of(queries, jnp.stack([jnp.array(_HIGH), like]), jnp.stack([jnp.array(_LOW), like]))
