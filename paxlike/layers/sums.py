# SPDX-License-Identifier: Apache-2.0
"""What one weight is used for many times, with a gradient that is summed up in float32.

JAX would sum it in the dtype of the layers: in bfloat16, what is less than 1/512 of a sum is lost.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike import mesh


@jax.custom_vjp
def add(x: jax.Array, b: jax.Array) -> jax.Array:
  """Returns x + b in the dtype of x, for a b that is broadcast to x."""
  return x + b.astype(x.dtype)


def _add_backward(b: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
  sizes = (1,) * (dy.ndim - b.ndim) + b.shape
  axes = [axis for axis, size in enumerate(sizes) if size != dy.shape[axis]]
  return dy, dy.astype(jnp.float32).sum(axes).reshape(b.shape).astype(b.dtype)


add.defvjp(lambda x, b: (add(x, b), b), _add_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def lookup(table: jax.Array, rows: jax.Array, dims: mesh.Dims) -> Any:
  """Returns [..., D] for int32 rows of a table [V, D]; rows [B], [B, T] or [T] are in [0, V).

  `dims` are those of the table.
  """
  if mesh.in_stage():
    return _on_devices(_local_lookup, table, rows, dims, gives_table=False)
  return table[rows]


def _lookup_backward(dims: mesh.Dims, saved: Any, dy: jax.Array) -> tuple[jax.Array, None]:
  table, rows = saved
  if mesh.in_stage():
    total = _on_devices(_local_sum, table, rows, dims, dy, gives_table=True)
  else:
    total = jnp.zeros(table.shape, jnp.float32).at[rows].add(dy.astype(jnp.float32))
  return total.astype(table.dtype), None


lookup.defvjp(
  lambda table, rows, dims: (lookup(table, rows, dims), (table, rows)), _lookup_backward
)


def _on_devices(
  function: Any, table: jax.Array, rows: jax.Array, dims: mesh.Dims, *others: Any, gives_table: bool
) -> jax.Array:
  """Calls a function of the parts that a device has: XLA has no gather in a stage of a pipeline."""
  sizes = mesh.sizes_here(mesh.AXES)
  if not sizes:
    return function(table, rows, *others, (), (), ())
  of_table = mesh.partition(dims, table.shape, sizes)
  of_rows = mesh.partition(("batch", "time")[: rows.ndim], rows.shape, sizes)
  of_output = PartitionSpec(*of_rows, None)
  axes = (mesh.axes_of(PartitionSpec(entry)) for entry in of_table)
  cuts = (*map(tuple, axes), tuple(mesh.axes_of(of_rows)))
  on_all = mesh.on_each_device(
    lambda *arrays: function(*arrays, *cuts),
    (of_table, of_rows, *(of_output for _ in others)),
    of_table if gives_table else of_output,
  )
  return on_all(table, rows, *others)


def _own(rows: jax.Array, num_rows: int, axes: tuple[str, ...]) -> jax.Array:
  """Returns rows as this device, which has so many of the table, counts them."""
  return rows - jax.lax.axis_index(axes) * num_rows if axes else rows


def _local_lookup(table: Any, rows: Any, of_vocab: Any, of_model: Any, of_rows: Any) -> jax.Array:
  del of_rows
  own = _own(rows, len(table), of_vocab)
  table = jax.lax.all_gather(table, of_model, axis=1, tiled=True) if of_model else table
  is_here = (own >= 0) & (own < len(table))
  x = jnp.where(is_here[..., None], table[jnp.where(is_here, own, 0)], jnp.zeros((), table.dtype))
  return jax.lax.psum(x, of_vocab) if of_vocab else x


def _local_sum(
  table: Any, rows: Any, dy: Any, of_vocab: Any, of_model: Any, of_rows: Any
) -> jax.Array:
  own = _own(rows, len(table), of_vocab)
  own = jnp.where(own < 0, len(table), own)  # From the end negative ones would count.
  zeros = jnp.zeros((len(table), dy.shape[-1]), jnp.float32)
  total = zeros.at[own].add(dy.astype(jnp.float32), mode="drop")
  if rest := tuple(axis for axis in of_rows if axis not in of_model):
    total = jax.lax.psum(total, rest)
  if not of_model:
    return total
  if set(of_model) <= set(of_rows):
    return jax.lax.psum_scatter(total, of_model, scatter_dimension=1, tiled=True)
  size = table.shape[1]
  return jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index(of_model) * size, size, 1)
