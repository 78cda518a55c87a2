# SPDX-License-Identifier: Apache-2.0
"""`shard_map` around attention kernels that XLA cannot partition."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.devices import mesh
from paxlike.layers.attention.kernels import AttentionOptions

_QKV: mesh.Dims = ("batch", "time", "heads", None)
_DIMS: dict[str, mesh.Dims] = {
  "segments_BT": ("batch", "time"),
  "sinks_N": ("heads",),
  "bias_NTS": ("heads", "time", "time"),
}


def per_device(
  kernel: Callable[..., jax.Array],
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  options: AttentionOptions,
  *names: str,
  block: int = 128,
) -> jax.Array:
  """Calls `kernel` once on each device of the current mesh.

  Batch and heads stay sharded; T is all-gathered and padded to a multiple of `block`. KV heads are
  repeated until the number of head shards divides them.

  Args:
    kernel: (q_BTNH, k_BSKH, v_BSKH, **arrays) -> y_BTNH.
    q_BTNH: See `Kernel`.
    k_BSKH: See `Kernel`.
    v_BSKH: See `Kernel`.
    options: See `AttentionOptions`.
    *names: Names of the array options to pass to the kernel; an option that is not set is None.
    block: The kernel requires a T that is a multiple of this.
  """
  sizes = mesh.sizes_here(mesh.AXES)
  arrays = {name: options.get(name) for name in names}
  given = {name: array for name, array in arrays.items() if array is not None}

  def local(q: jax.Array, k: jax.Array, v: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    length = q.shape[1]
    q, k, v = (_padded(x, _QKV, block) for x in (q, k, v))
    given = {name: _padded(x, _DIMS[name], block) for name, x in given.items()}
    return kernel(q, k, v, **{**arrays, **given})[:, :length]

  if not sizes:
    return local(q_BTNH, k_BSKH, v_BSKH, given)
  keys = repeated_keys(q_BTNH.shape[2], k_BSKH, v_BSKH, sizes)
  of_queries, of_keys = _spec(_QKV, q_BTNH, sizes), _spec(_QKV, keys[0], sizes)
  of_given = {name: _spec(_DIMS[name], x, sizes) for name, x in given.items()}
  on_all = mesh.on_each_device(local, (of_queries, of_keys, of_keys, of_given), of_queries)
  return on_all(q_BTNH, *keys, given)


def repeated_keys(
  num_heads: int, k_BSKH: jax.Array, v_BSKH: jax.Array, sizes: Mapping[str, int]
) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values, with heads repeated until the number of head shards divides them."""
  K = k_BSKH.shape[2]
  spec = mesh.partition(("heads",), (num_heads,), sizes)
  shards = math.prod(sizes[axis] for axis in mesh.axes_of(spec))
  repeats = shards // math.gcd(shards, K)
  if repeats == 1:
    return k_BSKH, v_BSKH
  return jnp.repeat(k_BSKH, repeats, axis=2), jnp.repeat(v_BSKH, repeats, axis=2)


def _spec(dims: mesh.Dims, x: jax.Array, sizes: Mapping[str, int]) -> PartitionSpec:
  """Returns the PartitionSpec of a tensor with T all-gathered."""
  return mesh.partition(tuple(None if dim == "time" else dim for dim in dims), x.shape, sizes)


def _padded(x: jax.Array, dims: mesh.Dims, block: int) -> jax.Array:
  """Pads T at the end, where the causal mask hides it: with the last segment id, or with zeros."""
  sizes = zip(dims, x.shape, strict=True)
  widths = [(0, -size % block if dim == "time" else 0) for dim, size in sizes]
  return jnp.pad(x, widths, mode="edge" if dims == _DIMS["segments_BT"] else "constant")
