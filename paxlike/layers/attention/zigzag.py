# SPDX-License-Identifier: Apache-2.0
"""Token orders of sequences that are sharded over the mesh axis `context`.

Zigzag order balances a causal mask: of the 2C chunks of a sequence, device i of C has chunk i, its
low chunk, followed by chunk 2C - 1 - i, its high chunk (Llama 3, arXiv:2407.21783, section 3.3.2).
For use inside `shard_map`; arrays are a device's shard, [B, T, ...].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

AXIS = "context"


class Order(NamedTuple):
  """A token order, as functions of a shard and C.

  Attributes:
    exchange: Permutes from sequence order to this order.
    restore: Permutes back to sequence order.
    positions: (T, C) -> int32 [T], the positions in the sequence of this device's tokens.
  """

  exchange: Callable[[jax.Array, int], jax.Array]
  restore: Callable[[jax.Array, int], jax.Array]
  positions: Callable[[int, int], jax.Array]


def _exchange(x: jax.Array, num_devices: int) -> jax.Array:
  """Returns a device's shard in zigzag order."""
  halves = (
    jax.lax.ppermute(half, AXIS, _holders(parity, num_devices))
    for parity, half in enumerate(jnp.split(x, 2, axis=1))
  )
  return jnp.concatenate(_swapped(*halves), axis=1)


def _restore(x: jax.Array, num_devices: int) -> jax.Array:
  """Returns a device's shard in sequence order."""
  halves = [
    jax.lax.ppermute(
      half, AXIS, [(after, before) for before, after in _holders(parity, num_devices)]
    )
    for parity, half in enumerate(_swapped(*jnp.split(x, 2, axis=1)))
  ]
  return jnp.concatenate(halves, axis=1)


def low_and_high(num_devices: int) -> jax.Array:
  """Returns int32 [2]: the indexes of a device's low and high chunks."""
  device = jax.lax.axis_index(AXIS)
  return jnp.stack([device, 2 * num_devices - 1 - device])


def _positions(length: int, num_devices: int) -> jax.Array:
  size = length // 2
  return (low_and_high(num_devices)[:, None] * size + jnp.arange(size)).reshape(-1)


def _holders(parity: int, num_devices: int) -> list[tuple[int, int]]:
  """Returns (source, target) devices for `ppermute` of the even (parity 0) or odd chunks."""
  last = 2 * num_devices - 1
  chunks = [2 * device + parity for device in range(num_devices)]
  return [(device, min(chunk, last - chunk)) for device, chunk in enumerate(chunks)]


def _swapped(one: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (low, high) chunks, given (even, odd) chunks, or vice versa."""
  is_even = jax.lax.axis_index(AXIS) % 2 == 0
  return jnp.where(is_even, one, other), jnp.where(is_even, other, one)


ZIGZAG = Order(_exchange, _restore, _positions)
CONTIGUOUS = Order(
  exchange=lambda x, _: x,
  restore=lambda x, _: x,
  positions=lambda length, _: jax.lax.axis_index(AXIS) * length + jnp.arange(length),
)
