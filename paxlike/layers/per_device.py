# SPDX-License-Identifier: Apache-2.0
"""Attention by kernels that XLA cannot partition, and that take tokens by the block."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike import mesh
from paxlike.layers.attention_kernels import Options

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
  options: Options,
  *names: str,
  block: int = 128,
) -> jax.Array:
  """Returns attention, for which each device of the current mesh calls `kernel` once.

  A device has its rows and heads, all tokens of them, filled up to a multiple of `block`. Where
  more devices share the heads than there are keys to share, these are repeated.

  Args:
    kernel: (q_BTNH, k_BSKH, v_BSKH, **arrays) -> BTNH.
    q_BTNH: As of `Kernel`, like the rest.
    k_BSKH: See there.
    v_BSKH: See there.
    options: See there.
    *names: The arrays among the options that the kernel is given; None for what there is not.
    block: What it takes whole numbers of tokens of.
  """
  sizes = mesh.sizes_here(mesh.AXES)
  arrays = {name: options.get(name) for name in names}
  given = {name: array for name, array in arrays.items() if array is not None}

  def local(q: jax.Array, k: jax.Array, v: jax.Array, given: dict[str, jax.Array]) -> jax.Array:
    length = q.shape[1]
    q, k, v = (_filled(x, _QKV, block) for x in (q, k, v))
    given = {name: _filled(x, _DIMS[name], block) for name, x in given.items()}
    return kernel(q, k, v, **{**arrays, **given})[:, :length]

  if not sizes:
    return local(q_BTNH, k_BSKH, v_BSKH, given)
  keys = keys_to_share(q_BTNH.shape[2], k_BSKH, v_BSKH, sizes)
  of_queries, of_keys = _cut(_QKV, q_BTNH, sizes), _cut(_QKV, keys[0], sizes)
  of_given = {name: _cut(_DIMS[name], x, sizes) for name, x in given.items()}
  on_all = mesh.on_each_device(local, (of_queries, of_keys, of_keys, of_given), of_queries)
  return on_all(q_BTNH, *keys, given)


def keys_to_share(
  num_heads: int, k_BSKH: jax.Array, v_BSKH: jax.Array, sizes: Mapping[str, int]
) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values, repeated as often as devices that share the heads need them."""
  K = k_BSKH.shape[2]
  cut = mesh.partition(("heads",), (num_heads,), sizes)
  shards = math.prod(sizes[axis] for axis in mesh.axes_of(cut))
  repeats = shards // math.gcd(shards, K)
  if repeats == 1:
    return k_BSKH, v_BSKH
  return jnp.repeat(k_BSKH, repeats, axis=2), jnp.repeat(v_BSKH, repeats, axis=2)


def _cut(dims: mesh.Dims, x: jax.Array, sizes: Mapping[str, int]) -> PartitionSpec:
  """Returns how the mesh cuts a tensor, but along no time."""
  return mesh.partition(tuple(None if dim == "time" else dim for dim in dims), x.shape, sizes)


def _filled(x: jax.Array, dims: mesh.Dims, block: int) -> jax.Array:
  """Adds tokens at the end, where no other sees them: more of the last segment, zeros of others."""
  sizes = zip(dims, x.shape, strict=True)
  widths = [(0, -size % block if dim == "time" else 0) for dim, size in sizes]
  return jnp.pad(x, widths, mode="edge" if dims == _DIMS["segments_BT"] else "constant")
