# SPDX-License-Identifier: Apache-2.0
"""Recurrence over sequences that are sharded over the mesh axis `context`.

Tokens stay in sequence order: device i of the axis has the i-th shard. The other functions are for
use inside of `on_shards`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.devices import mesh

AXIS = "context"


def on_shards(
  function: Callable[..., Any],
  inputs: Sequence[tuple[jax.Array | None, mesh.Dims]],
  outputs: Sequence[tuple[tuple[int, ...], mesh.Dims]],
) -> Any:
  """Returns function(*inputs, num_devices=C), called on each device with its shards.

  Args:
    function: Returns a tuple of as many arrays as `outputs`. C is the number of devices that share
      the dim "time" of the first input, which is 1 without a mesh.
    inputs: Pairs (array or None, its dims). The first is an array.
    outputs: Pairs (shape, dims) of the global outputs.
  """
  sizes = mesh.sizes_here(mesh.AXES)
  arrays = [x for x, _ in inputs]
  if not sizes:
    return function(*arrays, num_devices=1)
  specs = [None if x is None else mesh.partition(dims, x.shape, sizes) for x, dims in inputs]
  is_sharded = specs[0] is not None and AXIS in mesh.axes_of(specs[0])
  of_outputs = tuple(mesh.partition(dims, shape, sizes) for shape, dims in outputs)

  def local(*arrays: Any) -> Any:
    return function(*arrays, num_devices=sizes[AXIS] if is_sharded else 1)

  return mesh.on_each_device(local, tuple(specs), of_outputs)(*arrays)


def from_previous(x: jax.Array, num_devices: int) -> jax.Array:
  """Returns the previous device's x; zeros on the first device."""
  if num_devices == 1:
    return jnp.zeros_like(x)
  to_next = [(device, device + 1) for device in range(num_devices - 1)]
  return jax.lax.ppermute(x, AXIS, to_next)


def of_last(x: jax.Array, num_devices: int) -> jax.Array:
  """Returns the last device's x."""
  if num_devices == 1:
    return x
  is_last = jax.lax.axis_index(AXIS) == num_devices - 1
  return jax.lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), AXIS)


def runs(segments_BT: jax.Array, num_devices: int) -> jax.Array:
  """Returns int32 [B, T], the number of documents that began on this device up to each token.

  Tokens of the document of the previous device's last token have 0.
  """
  last_B1 = from_previous(segments_BT[:, -1:], num_devices)
  is_first = num_devices == 1 or jax.lax.axis_index(AXIS) == 0
  last_B1 = jnp.where(is_first, segments_BT[:, :1], last_B1)
  before_BT = jnp.concatenate([last_B1, segments_BT[:, :-1]], axis=1)
  return jnp.cumsum(segments_BT != before_BT, axis=1)
