# SPDX-License-Identifier: Apache-2.0
"""Orthogonalization of sharded weight matrices by Newton-Schulz iterations.

On a mesh, each matrix is orthogonalized by one device, its owner: all-to-alls over the axes that
shard the matrices give each of their devices whole ones, and others return the shards. Axes that
replicate the matrices split them, too, and all-gather the results. A single matrix is all-gathered
instead, since its other devices would have nothing to do.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.devices import mesh as mesh_lib
from paxlike.layers.module import Params, WeightSpec

# Of a quintic polynomial whose iteration moves singular values to about 0.7 to 1.2 (Jordan et al.,
# 2024, https://kellerjordan.github.io/posts/muon).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPSILON = 1e-7  # The smallest Frobenius norm that a matrix is divided by.


def newton_schulz(x_CMN: jax.Array, *, steps: int) -> jax.Array:
  """Returns matrices with the singular vectors of `x_CMN` and singular values of about 1.

  Matmuls are in the dtype of `x_CMN`, which holds C matrices; M may be the larger side.
  """
  norm = jnp.sqrt(jnp.square(x_CMN.astype(jnp.float32)).sum((1, 2), keepdims=True))
  x_CMN = (x_CMN / jnp.maximum(norm, _EPSILON)).astype(x_CMN.dtype)
  wide = x_CMN.shape[1] <= x_CMN.shape[2]
  gram = "cmn,ckn->cmk" if wide else "cmn,cmk->cnk"
  for _ in range(steps):
    a = jnp.einsum(gram, x_CMN, x_CMN)
    b = _B * a + _C * (a @ a)
    x_CMN = _A * x_CMN + (b @ x_CMN if wide else x_CMN @ b)
  return x_CMN


class Matrix(NamedTuple):
  """How a weight holds matrices: [*batch, *inputs, *outputs].

  Attributes:
    batch: The number of dims before those of a matrix, such as "layer" and "experts".
    inputs: The number of contracted dims.
    num_inputs, num_outputs: The sizes of a matrix.
    transposed: Whether the outputs are the dim "model". Such matrices are transposed, so that M is
      always the residual stream: maps from and to it then have the same sharding, and one batch.
  """

  batch: int
  inputs: int
  num_inputs: int
  num_outputs: int
  transposed: bool


def matrix(spec: WeightSpec) -> Matrix | None:
  """Returns how the weight of a linear map in a block holds matrices; None for other weights.

  Others are embeddings, the output projection, biases, norms and adapters.
  """
  if not spec.contracted or {"vocab", "position", "adapter"} & set(spec.dims):
    return None
  batch, inputs = spec.dims.index(spec.contracted[0]), len(spec.contracted)
  if spec.dims[batch : batch + inputs] != spec.contracted or batch + inputs == len(spec.dims):
    return None  # Not [*batch, *inputs, *outputs].
  rows = math.prod(spec.shape[batch : batch + inputs])
  columns = math.prod(spec.shape[batch + inputs :])
  return Matrix(batch, inputs, rows, columns, transposed=spec.dims[-1] == "model")


def orthogonalized(
  weights: Params, specs: Mapping[str, WeightSpec], *, steps: int, dtype: Any, over_data: bool
) -> Params:
  """Returns each array with all its matrices orthogonalized, in `dtype`.

  Args:
    weights: Arrays like the weights that `specs` describe, each of which has a `Matrix`.
    specs: The specs.
    steps: Newton-Schulz iterations.
    dtype: The dtype of matmuls and collectives.
    over_data: Whether the arrays are sharded over `data` too.
  """
  sizes = mesh_lib.sizes_here(mesh_lib.AXES)
  groups: dict[Any, list[str]] = {}
  partitions: dict[str, PartitionSpec] = {}
  hows: dict[str, Matrix] = {}
  for name, x in weights.items():
    spec, how = specs[name], matrix(specs[name])
    assert how is not None, name
    hows[name] = how
    if sizes:
      partition = mesh_lib.partition(spec.dims, x.shape, sizes)
      if over_data:
        partition = mesh_lib.shard_over_data(partition, x.shape, sizes)
      partitions[name] = partition
    sides = how.num_inputs, how.num_outputs
    key = sides[::-1] if how.transposed else sides, _axes(partitions.get(name), how)
    groups.setdefault(key, []).append(name)
  found: Params = {}
  for (_, axes), names in groups.items():
    function = functools.partial(
      _of_group,
      hows=[hows[name] for name in names],
      axes=axes,
      sizes=sizes,
      steps=steps,
      dtype=dtype,
    )
    if sizes:
      where = tuple(partitions[name] for name in names)
      function = mesh_lib.on_each_device(function, where, where)
    found |= zip(names, function(*(weights[name] for name in names)), strict=True)
  return found


class _Axes(NamedTuple):
  """The mesh axes that shard the dims of matrices: C, M and N."""

  batch: tuple[str, ...] = ()
  rows: tuple[str, ...] = ()
  columns: tuple[str, ...] = ()


def _axes(partition: PartitionSpec | None, how: Matrix) -> _Axes:
  if partition is None:
    return _Axes()
  by_dim, last = mesh_lib.axes_by_dim(partition), how.batch + how.inputs
  parts = by_dim[: how.batch], by_dim[how.batch : last], by_dim[last:]
  batch, rows, columns = (tuple(axis for axes in part for axis in axes) for part in parts)
  return _Axes(batch, columns, rows) if how.transposed else _Axes(batch, rows, columns)


def _of_group(
  *arrays: jax.Array,
  hows: Sequence[Matrix],
  axes: _Axes,
  sizes: Mapping[str, int],
  steps: int,
  dtype: Any,
) -> tuple[jax.Array, ...]:
  """Orthogonalizes arrays with matrices of one shape and sharding; on a mesh, their shards."""
  matrices = [_flattened(x.astype(dtype), how) for x, how in zip(arrays, hows, strict=True)]
  x_CMN = jnp.concatenate(matrices) if len(matrices) > 1 else matrices[0]
  used = {axis for part in axes for axis in part}
  free = tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)
  y_CMN = _by_owners(x_CMN, axes, free, sizes, steps)
  found, start = [], 0
  for x, flat, how in zip(arrays, matrices, hows, strict=True):
    y = y_CMN[start : start + len(flat)]
    found.append((y.mT if how.transposed else y).reshape(x.shape))
    start += len(flat)
  return tuple(found)


def _flattened(x: jax.Array, how: Matrix) -> jax.Array:
  """Returns [C, M, N]."""
  batch, last = x.shape[: how.batch], how.batch + how.inputs
  x = x.reshape(math.prod(batch), math.prod(x.shape[how.batch : last]), -1)
  return x.mT if how.transposed else x


def _by_owners(
  x_CMN: jax.Array, axes: _Axes, free: tuple[str, ...], sizes: Mapping[str, int], steps: int
) -> jax.Array:
  """Orthogonalizes sharded matrices, each on one device; returns shards, maybe with padding."""
  count, copies = len(x_CMN), math.prod(sizes[axis] for axis in free)
  shards = math.prod(sizes[axis] for axis in (*axes.rows, *axes.columns))
  # All-to-alls move each matrix twice, an all-gather once. After it, all devices compute the same,
  # which takes no longer if there is only one matrix for them.
  gathers = math.ceil(count / copies) == 1
  here = 1 if gathers else shards * math.ceil(count / copies / shards)
  x_CMN = jnp.pad(x_CMN, ((0, here * copies - count), (0, 0), (0, 0)))
  if free:
    x_CMN = jax.lax.dynamic_slice_in_dim(x_CMN, jax.lax.axis_index(free) * here, here)
  if gathers:
    _, rows, columns = x_CMN.shape
    for dim, names in ((1, axes.rows), (2, axes.columns)):
      if names:
        x_CMN = jax.lax.all_gather(x_CMN, names, axis=dim, tiled=True)
    x_CMN = newton_schulz(x_CMN, steps=steps)
    for dim, names, size in ((1, axes.rows, rows), (2, axes.columns, columns)):
      if names:
        start = jax.lax.axis_index(names) * size
        x_CMN = jax.lax.dynamic_slice_in_dim(x_CMN, start, size, dim)
  else:
    split = [(dim, names) for dim, names in ((1, axes.rows), (2, axes.columns)) if names]
    # XLA for CPUs rejects an all-to-all of slices that it knows to be zeros and transposed arrays.
    x_CMN = jax.lax.optimization_barrier(x_CMN)
    for dim, names in split:
      x_CMN = jax.lax.all_to_all(x_CMN, names, split_axis=0, concat_axis=dim, tiled=True)
    x_CMN = newton_schulz(x_CMN, steps=steps)
    for dim, names in reversed(split):
      x_CMN = jax.lax.all_to_all(x_CMN, names, split_axis=dim, concat_axis=0, tiled=True)
  return jax.lax.all_gather(x_CMN, free, axis=0, tiled=True) if free else x_CMN
