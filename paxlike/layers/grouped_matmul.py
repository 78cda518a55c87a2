# SPDX-License-Identifier: Apache-2.0
"""Products of consecutive rows with a matrix for each group of them.

`jax.lax.ragged_dot` is one kernel on GPU and TPU. On CPU it multiplies every row with every matrix;
there the groups are walked in blocks, each a plain product of matrices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

_LARGEST_BLOCK = 256


@jax.custom_vjp
def grouped_matmul(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns [M, F]: each row of x times the matrix of its group.

  Args:
    x_MD: Rows in the order of their groups.
    w_EDF: A matrix for each group, of the same dtype.
    sizes_E: int32, the rows of each group. What rows beyond them give is unspecified, but finite.
  """
  return outputs(x_MD, w_EDF, sizes_E, x_MD.dtype)


def _forward(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, Any]:
  return grouped_matmul(x_MD, w_EDF, sizes_E), (x_MD, w_EDF, sizes_E)


def _backward(saved: Any, dy_MF: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  x_MD, w_EDF, sizes_E = saved
  dx_MD = to_inputs(dy_MF, w_EDF, sizes_E, x_MD.dtype)
  return dx_MD, to_weights(x_MD, dy_MF, sizes_E, w_EDF.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def outputs(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
  """Returns the product [M, F] in `dtype`; it has no gradient."""
  return jax.lax.platform_dependent(
    x_MD,
    w_EDF,
    sizes_E,
    cpu=functools.partial(_multiply_blocks, dtype=dtype),
    default=functools.partial(jax.lax.ragged_dot, preferred_element_type=dtype),
  )


def to_inputs(dy_MF: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
  """Returns the gradient of x, [M, D]."""
  return outputs(used(dy_MF, sizes_E), w_EDF.swapaxes(1, 2), sizes_E, dtype)


def to_weights(x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, dtype: Any) -> jax.Array:
  """Returns the gradient of w, [E, D, F]."""
  return jax.lax.platform_dependent(
    x_MD,
    used(dy_MF, sizes_E),
    sizes_E,
    cpu=functools.partial(_multiply_transposed_blocks, dtype=dtype),
    default=functools.partial(_ragged_transposed, dtype=dtype),
  )


def used(x_MD: jax.Array, sizes_E: jax.Array) -> jax.Array:
  """Returns x with zeros in the rows that are in no group: they must not reach the gradients."""
  used_M = jnp.arange(len(x_MD)) < sizes_E.sum()
  return jnp.where(used_M[:, None], x_MD, jnp.zeros((), x_MD.dtype))


def _ragged_transposed(
  x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, *, dtype: Any
) -> jax.Array:
  dims = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return jax.lax.ragged_dot_general(x_MD, dy_MF, sizes_E, dims, preferred_element_type=dtype)


def _block_size(num_rows: int, num_groups: int) -> int:
  """A quarter of a group: large enough for the library, small enough to waste little."""
  return min(_LARGEST_BLOCK, max(8, num_rows // num_groups // 4))


def _multiply_blocks(
  x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, dtype: Any
) -> jax.Array:
  (M, _), (E, _, F) = x_MD.shape, w_EDF.shape
  size = _block_size(M, E)
  blocks_E = -(-sizes_E // size)
  last_blocks_E = jnp.cumsum(blocks_E)
  starts_E = jnp.cumsum(sizes_E) - sizes_E
  x_MD = jnp.pad(x_MD, ((0, size), (0, 0)))

  def block(i: jax.Array, y_MF: jax.Array) -> jax.Array:
    e = jnp.searchsorted(last_blocks_E, i, side="right")
    first = starts_E[e] + (i - last_blocks_E[e] + blocks_E[e]) * size
    x = jax.lax.dynamic_slice_in_dim(x_MD, first, size)
    y = jnp.dot(x, w_EDF[e], preferred_element_type=dtype)
    # The last block of a group reaches into the next group, which then writes its own rows.
    return jax.lax.dynamic_update_slice_in_dim(y_MF, y, first, 0)

  return jax.lax.fori_loop(0, last_blocks_E[-1], block, jnp.zeros((M + size, F), dtype))[:M]


def _multiply_transposed_blocks(
  x_MD: jax.Array, dy_MF: jax.Array, sizes_E: jax.Array, *, dtype: Any
) -> jax.Array:
  (M, D), F, E = x_MD.shape, dy_MF.shape[1], len(sizes_E)
  size = _block_size(M, E)
  x_MD, dy_MF = (jnp.pad(rows, ((0, size), (0, 0))) for rows in (x_MD, dy_MF))
  ends_E = jnp.cumsum(sizes_E)

  def group(e: jax.Array, dw_EDF: jax.Array) -> jax.Array:
    def block(i: jax.Array, dw_DF: jax.Array) -> jax.Array:
      first = ends_E[e] - sizes_E[e] + i * size
      own = (first + jnp.arange(size) < ends_E[e])[:, None]
      x = jax.lax.dynamic_slice_in_dim(x_MD, first, size)
      x = jnp.where(own, x, jnp.zeros((), x.dtype))
      dy = jax.lax.dynamic_slice_in_dim(dy_MF, first, size)
      return dw_DF + jnp.dot(x.T, dy, preferred_element_type=dtype)

    zero = jnp.zeros((D, F), dtype)
    return dw_EDF.at[e].set(jax.lax.fori_loop(0, -(-sizes_E[e] // size), block, zero))

  return jax.lax.fori_loop(0, E, group, jnp.zeros((E, D, F), dtype))
