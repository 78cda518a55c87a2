# SPDX-License-Identifier: Apache-2.0
"""Grouped matmul kernels for NVIDIA GPUs, in Pallas for Triton.

A tile holds rows of one group only, so padding is less than a tile per group (MegaBlocks; Gale et
al., 2022, arXiv:2211.15841).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Tile sizes; the contracted dim is read 128 bytes at a time. Guesses for Hopper, not measured.
_ROWS, _COLUMNS = 128, 256
# Row tiles per batch. A batch covers all column tiles before the next batch begins, to reuse them
# from L2 cache.
_ROW_TILES = 8


class _Tiles(NamedTuple):
  """Row tiles: group, first row and end row of each; group E holds the rows of no group."""

  groups: jax.Array
  firsts: jax.Array
  ends: jax.Array


def multiply(
  x_MD: jax.Array,
  w: jax.Array,
  sizes_E: jax.Array,
  dtype: Any,
  *,
  transposed: bool = False,
  interpret: bool = False,
) -> jax.Array:
  """Returns [M, F] in `dtype`: each row times the matrix of its group, zeros for rows of no group.

  Args:
    x_MD: Rows sorted by group.
    w: [E, D, F]; [E, F, D] if `transposed`.
    sizes_E: int32, the number of rows of each group.
    dtype: Of the result.
    transposed: Whether `w` is transposed.
    interpret: Whether to run in the interpreter, without a GPU.
  """
  M, F = len(x_MD), w.shape[1 if transposed else 2]
  tiles = _tiles(sizes_E, M)
  num_column_tiles = pl.cdiv(F, _COLUMNS)
  kernel = functools.partial(
    _multiply,
    num_column_tiles=num_column_tiles,
    num_row_tiles=len(tiles.groups),
    transposed=transposed,
  )
  call = _call(kernel, len(tiles.groups) * num_column_tiles, (M, F), dtype, interpret)
  return call(*tiles, _addressed(x_MD), _addressed(w))


def multiply_transposed(
  x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, dtype: Any, *, interpret: bool = False
) -> jax.Array:
  """Returns [E, D, F] in `dtype`: x.T @ dy for the rows of each group."""
  (_, D), F, E = x_MD.shape, dy_MF.shape[1], len(sizes_E)
  if x_MD.dtype == dy_MF.dtype == jnp.int8:
    # Tensor cores need int8 operands contiguous along the contracted dim, here the rows; Triton
    # would load synchronously and transpose byte by byte. bfloat16 operands are summed in float32,
    # which rounds sums above 2**24.
    x_MD, dy_MF = x_MD.astype(jnp.bfloat16), dy_MF.astype(jnp.bfloat16)
  grid = (pl.cdiv(F, _COLUMNS), pl.cdiv(D, _ROWS), E)
  ends_E = jnp.cumsum(sizes_E)
  call = _call(_multiply_transposed, grid, (E, D, F), dtype, interpret)
  return call(ends_E - sizes_E, ends_E, _addressed(x_MD), _addressed(dy_MF))


def _addressed(x: jax.Array) -> jax.Array:
  """Returns x; as bfloat16, if it is an 8-bit array that Pallas could not address.

  Pallas computes offsets in int32 for arrays of up to 2**32 bytes; those of an 8-bit array of more
  than 2**31 bytes would overflow. As bfloat16, the array has more than 2**32 bytes and offsets are
  int64. int8 matmuls then accumulate in float32, which rounds sums above 2**24.
  """
  return x.astype(jnp.bfloat16) if x.itemsize == 1 and 2**31 < x.size <= 2**32 else x


def _call(
  kernel: Callable[..., None], grid: Any, shape: tuple[int, ...], dtype: Any, interpret: bool
) -> Callable[..., jax.Array]:
  return pl.pallas_call(
    kernel,
    grid=grid,
    out_shape=jax.ShapeDtypeStruct(shape, dtype),
    compiler_params=triton.CompilerParams(num_warps=8, num_stages=3),
    name="grouped_matmul",
    interpret=interpret,
  )


def _tiles(sizes_E: jax.Array, num_rows: int) -> _Tiles:
  """Returns as many tiles as any group sizes may need; surplus tiles begin after the last row."""
  sizes = jnp.append(sizes_E, num_rows - sizes_E.sum()).astype(jnp.int32)
  ends, counts = jnp.cumsum(sizes), -(-sizes // _ROWS)
  tiles = jnp.arange(num_rows // _ROWS + len(sizes), dtype=jnp.int32)
  last = jnp.cumsum(counts)
  groups = jnp.minimum((tiles[:, None] >= last).sum(1), len(sizes_E))
  firsts = (ends - sizes)[groups] + (tiles - (last - counts)[groups]) * _ROWS
  return _Tiles(groups.astype(jnp.int32), firsts, ends[groups])


def _multiply(
  groups: Any,
  firsts: Any,
  ends: Any,
  x_MD: Any,
  w: Any,
  y_MF: Any,
  *,
  num_column_tiles: int,
  num_row_tiles: int,
  transposed: bool,
):
  # The row tile and column tile of this program.
  batch, place = jnp.divmod(pl.program_id(0), _ROW_TILES * num_column_tiles)
  batch_size = jnp.minimum(_ROW_TILES, num_row_tiles - batch * _ROW_TILES)
  row_tile = batch * _ROW_TILES + place % batch_size
  group, end = groups[row_tile], ends[row_tile]
  rows = firsts[row_tile] + jnp.arange(_ROWS)
  columns = place // batch_size * _COLUMNS + jnp.arange(_COLUMNS)
  (_, D), (_, F) = x_MD.shape, y_MF.shape
  size = _depth(x_MD)

  def add(step: jax.Array, total: jax.Array) -> jax.Array:
    depths = step * size + jnp.arange(size)
    x = _load(x_MD, (), (rows, end), (depths, D))
    if transposed:
      return total + _dot(x, _load(w, (group,), (columns, F), (depths, D)), (1, 1))
    return total + _dot(x, _load(w, (group,), (depths, D), (columns, F)), (1, 0))

  steps = (group < w.shape[0]).astype(jnp.int32) * pl.cdiv(D, size)
  total = jax.lax.fori_loop(0, steps, add, _zeros(x_MD, w))
  _store(y_MF, (), (rows, end), (columns, F), total)


def _multiply_transposed(firsts: Any, ends: Any, x_MD: Any, dy_MF: Any, dw_EDF: Any):
  group = pl.program_id(2)
  first, end = firsts[group], ends[group]
  ins = pl.program_id(1) * _ROWS + jnp.arange(_ROWS)
  outs = pl.program_id(0) * _COLUMNS + jnp.arange(_COLUMNS)
  _, D, F = dw_EDF.shape
  size = _depth(x_MD)

  def add(step: jax.Array, total: jax.Array) -> jax.Array:
    rows = first + step * size + jnp.arange(size)
    x = _load(x_MD, (), (rows, end), (ins, D))
    return total + _dot(x, _load(dy_MF, (), (rows, end), (outs, F)), (0, 0))

  total = jax.lax.fori_loop(0, pl.cdiv(end - first, size), add, _zeros(x_MD, dy_MF))
  _store(dw_EDF, (group,), (ins, D), (outs, F), total)


# Indices along a dim, and the end of the valid ones.
_Along = tuple[jax.Array, Any]


def _load(array: Any, leading: tuple[Any, ...], rows: _Along, columns: _Along) -> jax.Array:
  where, mask = _indexes_and_mask(leading, rows, columns)
  return triton.load(array.at[where], mask=mask, other=jnp.zeros((), array.dtype))


def _store(array: Any, leading: tuple[Any, ...], rows: _Along, columns: _Along, values: jax.Array):
  where, mask = _indexes_and_mask(leading, rows, columns)
  triton.store(array.at[where], values.astype(array.dtype), mask=mask)


def _indexes_and_mask(leading: tuple[Any, ...], rows: _Along, columns: _Along) -> Any:
  (row, end), (column, width) = rows, columns
  mask = (row < end)[:, None] & (column < width)[None, :]
  return (*leading, row[:, None], column[None, :]), mask


def _depth(x: Any) -> int:
  """Returns the entries of the contracted dim per step."""
  return 128 // x.dtype.itemsize


def _zeros(a: Any, b: Any) -> jax.Array:
  return jnp.zeros((_ROWS, _COLUMNS), _sum_dtype(a, b))


def _sum_dtype(a: Any, b: Any) -> Any:
  return jnp.int32 if a.dtype == b.dtype == jnp.int8 else jnp.float32


def _dot(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
  sums = _sum_dtype(a, b)
  if a.dtype != b.dtype or (a.dtype.itemsize == 1 and sums == jnp.float32):
    # Through Pallas, Triton multiplies FP8 in float16, which is slower. bfloat16 represents every
    # FP8 number exactly.
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
  return jax.lax.dot_general(
    a,
    b,
    (((over[0],), (over[1],)), ((), ())),
    precision=jax.lax.Precision.HIGH if a.dtype == jnp.float32 else None,
    preferred_element_type=sums,
  )
