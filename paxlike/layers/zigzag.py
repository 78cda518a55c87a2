# SPDX-License-Identifier: Apache-2.0
"""The order of time in which devices that share a sequence have equal shares of a causal mask.

Of 2C chunks of a sequence, device i of the C of the mesh axis `context` holds chunk i, its low one,
and chunk 2C - 1 - i, its high one (Llama 3, arXiv:2407.21783, section 3.3.2). All functions are for
use inside `shard_map`. Shapes: [B, T, ...] is a device's contiguous share, [2, B, c, ...] its low
and high chunk of c = T / 2 tokens.
"""

import jax
import jax.numpy as jnp

AXIS = "context"


def chunks_of(device: jax.Array, num_devices: int) -> jax.Array:
  """Returns int32 [2]: the numbers of a device's chunks."""
  return jnp.stack([device, 2 * num_devices - 1 - device])


def exchange(x: jax.Array, num_devices: int) -> jax.Array:
  """Returns a device's [2, B, c, ...] for its [B, T, ...]."""
  halves = jnp.moveaxis(x.reshape(len(x), 2, -1, *x.shape[2:]), 1, 0)
  even, odd = (
    jax.lax.ppermute(half, AXIS, _holders(parity, num_devices))
    for parity, half in enumerate(halves)
  )
  return _swapped(even, odd)


def restore(x: jax.Array, num_devices: int) -> jax.Array:
  """Returns a device's [B, T, ...] for its [2, B, c, ...]."""
  halves = [
    jax.lax.ppermute(half, AXIS, [(to, of) for of, to in _holders(parity, num_devices)])
    for parity, half in enumerate(_swapped(*x))
  ]
  return jnp.concatenate(halves, axis=1)


def _holders(parity: int, num_devices: int) -> list[tuple[int, int]]:
  """Returns who has the even chunks, or the odd ones, before and after: each device has one."""
  last = 2 * num_devices - 1
  chunks = [2 * device + parity for device in range(num_devices)]
  return [(device, min(chunk, last - chunk)) for device, chunk in enumerate(chunks)]


def _swapped(one: jax.Array, other: jax.Array) -> jax.Array:
  """Returns (even, odd) chunks for (low, high) ones, and the other way round."""
  is_even = jax.lax.axis_index(AXIS) % 2 == 0
  return jnp.stack([jnp.where(is_even, one, other), jnp.where(is_even, other, one)])
