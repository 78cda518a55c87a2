# SPDX-License-Identifier: Apache-2.0
"""Bias addition and table lookup whose weight gradients are summed in float32.

JAX sums them in the compute dtype; in bfloat16, addends below 1/512 of a sum are lost. Between TPUs
that gather a table, XLA sums its gradient in the table's dtype, as it does those of other weights.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.devices import mesh, topology
from paxlike.layers.precision import cpu_dots

_LANES = 128  # TPUs pad rows to multiples of this.


@jax.custom_vjp
def add(x: jax.Array, b: jax.Array) -> jax.Array:
  """Returns x + b in the dtype of x; b is broadcast to x."""
  return x + b.astype(x.dtype)


def _add_backward(b: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
  sizes = (1,) * (dy.ndim - b.ndim) + b.shape
  axes = [axis for axis, size in enumerate(sizes) if size != dy.shape[axis]]
  return dy, dy.astype(jnp.float32).sum(axes).reshape(b.shape).astype(b.dtype)


add.defvjp(lambda x, b: (add(x, b), b), _add_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, ids: jax.Array, dims: mesh.Dims) -> Any:
  """Returns table[ids], [..., D], for a table [V, D] and int32 ids [B], [B, T] or [T] in [0, V).

  `dims` are the dim names of the table.
  """
  if _is_local(table, ids, dims):
    return _on_devices(_local_lookup, table, ids, dims, gives_table=False)
  if cpu_dots.on_cpu():
    table, ids = cpu_dots.tied(table, ids)
  return table[ids]


def _lookup_backward(dims: mesh.Dims, saved: Any, dy: jax.Array) -> tuple[jax.Array, None]:
  table, ids = saved
  if _is_local(table, ids, dims):
    total = _on_devices(_local_sum, table, ids, dims, dy, gives_table=True)
  else:
    dy = _sharded_as_table(dy, table, ids, dims)
    total = jnp.zeros(table.shape, jnp.float32).at[ids].add(dy.astype(jnp.float32))
  return total.astype(table.dtype), None


lookup.defvjp(lambda table, ids, dims: (lookup(table, ids, dims), (table, ids)), _lookup_backward)


def _is_local(table: jax.Array, ids: jax.Array, dims: mesh.Dims) -> bool:
  """Returns whether each device all-gathers the table's columns and looks up its own tokens only.

  Otherwise XLA lets it look up its columns for the tokens of all devices that share the table, and
  exchanges the rows. TPUs pad rows to 128 numbers, so that in a pod these rows may take more memory
  than the table. In a pipeline stage, XLA cannot partition indexing at all.
  """
  if mesh.in_stage():
    return True
  sizes = mesh.sizes_here(mesh.AXES)
  if not sizes or ids.ndim != 2 or not topology.is_tpu():
    return False
  of_vocab, of_model = mesh.axes_by_dim(mesh.partition(dims, table.shape, sizes))
  of_ids = mesh.axes_of(mesh.partition(("batch", "time"), ids.shape, sizes))

  def shards(axes: Iterable[str]) -> int:
    return math.prod(sizes[axis] for axis in axes)

  num_ids = ids.size // shards(of_ids.difference(of_model))
  columns = -(-table.shape[1] // (shards(of_model) * _LANES)) * _LANES
  return bool(of_model) and num_ids * columns >= table.size // shards(of_vocab)


def _sharded_as_table(dy: jax.Array, table: jax.Array, ids: jax.Array, dims: mesh.Dims) -> Any:
  """Shards the last dim of dy as the table's, so that devices exchange its rows in its own dtype.

  Otherwise XLA converts them to float32 first.
  """
  sizes = mesh.sizes_here(mesh.AXES)
  if not sizes or ids.ndim != 2:
    return dy
  of_model = mesh.axes_by_dim(mesh.partition(dims, table.shape, sizes))[-1]
  of_ids = mesh.axes_by_dim(mesh.partition(("batch", "time"), ids.shape, sizes))
  rest = [tuple(axis for axis in axes if axis not in of_model) for axes in of_ids]
  return jax.lax.with_sharding_constraint(dy, PartitionSpec(*rest, of_model))


def _on_devices(
  function: Any, table: jax.Array, ids: jax.Array, dims: mesh.Dims, *others: Any, gives_table: bool
) -> jax.Array:
  """Calls `function` on each device's shards; see `_is_local`."""
  sizes = mesh.sizes_here(mesh.AXES)
  if not sizes:
    return function(table, ids, *others, (), (), ())
  of_table = mesh.partition(dims, table.shape, sizes)
  of_ids = mesh.partition(("batch", "time")[: ids.ndim], ids.shape, sizes)
  of_output = PartitionSpec(*of_ids, None)
  # Sorted: each process has its own order of a set, and all are to have the same program.
  sharding_axes = (*mesh.axes_by_dim(of_table), tuple(sorted(mesh.axes_of(of_ids))))
  on_all = mesh.on_each_device(
    lambda *arrays: function(*arrays, *sharding_axes),
    (of_table, of_ids, *(of_output for _ in others)),
    of_table if gives_table else of_output,
  )
  return on_all(table, ids, *others)


def _local_ids(ids: jax.Array, num_ids: int, axes: tuple[str, ...]) -> jax.Array:
  """Returns ids relative to this device's shard of the table; each shard has `num_ids` entries."""
  return ids - jax.lax.axis_index(axes) * num_ids if axes else ids


def _local_lookup(table: Any, ids: Any, of_vocab: Any, of_model: Any, of_ids: Any) -> jax.Array:
  del of_ids
  table = jax.lax.all_gather(table, of_model, axis=1, tiled=True) if of_model else table
  if not of_vocab:
    return table[ids]
  own = _local_ids(ids, len(table), of_vocab)
  is_here = (own >= 0) & (own < len(table))
  x = jnp.where(is_here[..., None], table[jnp.where(is_here, own, 0)], jnp.zeros((), table.dtype))
  return jax.lax.psum(x, of_vocab)


def _local_sum(
  table: Any, ids: Any, dy: Any, of_vocab: Any, of_model: Any, of_ids: Any
) -> jax.Array:
  own = _local_ids(ids, len(table), of_vocab)
  own = jnp.where(own < 0, len(table), own)  # Negative indexes would count from the end.
  zeros = jnp.zeros((len(table), dy.shape[-1]), jnp.float32)
  total = zeros.at[own].add(dy.astype(jnp.float32), mode="drop")
  if of_model and set(of_model) <= set(of_ids):
    total = jax.lax.psum_scatter(total, of_model, scatter_dimension=1, tiled=True)
  elif of_model:
    size = table.shape[1]
    total = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(of_model) * size, size, 1)
  # After the columns that others hold are gone: slices of TPUs send this over their slow network.
  rest = tuple(axis for axis in of_ids if axis not in of_model)
  return jax.lax.psum(total, rest) if rest else total
