# SPDX-License-Identifier: Apache-2.0
"""Dots that XLA for CPUs computes fast.

It converts the operands of most dots in bfloat16 to float32, which takes twice as long where the
processor has instructions for bfloat16 (AVX512-BF16, AMX). A dot keeps its operands if it

- accumulates in float32,
- has at most one batch dim, the first,
- contracts the last dim of its first operand, and
- no operand is the result of a transposition, which stands for a layout that the dot refuses.
"""

from typing import Any

import jax
import jax.numpy as jnp

from paxlike.devices import mesh, topology


def on_cpu() -> bool:
  """Returns whether the target devices, all of one kind, are CPUs."""
  return topology.devices()[0].platform == "cpu"


def dot(a: jax.Array, b: jax.Array, axis: int, *, dtype: Any = None) -> jax.Array:
  """Returns the product of a [..., M, D] and b over its `axis`; sums of bfloat16 are float32.

  Args:
    a: [M, D] or, with a batch dim, [G, M, D].
    b: [D, F] or [F, D]; with a batch dim, [G, D, F] or [G, F, D].
    axis: Of b: the one of D, -2 or -1.
    dtype: Of the result; None: that of a.
  """
  batch = tuple(range(a.ndim - 2))
  dims = (((a.ndim - 1,), (b.ndim + axis,)), (batch, batch))
  dtype = a.dtype if dtype is None else dtype
  y = jax.lax.dot_general(a, b, dims, preferred_element_type=sums_of(dtype))
  return y.astype(dtype)


def dot_of_rows(x_MD: jax.Array, y_MF: jax.Array) -> jax.Array:
  """Returns x.T y [D, F], such as the gradient of a weight."""
  if x_MD.dtype != jnp.bfloat16 and x_MD.shape[1] >= y_MF.shape[1]:
    return x_MD.T @ y_MF
  # If y is the wider one, also float32 takes half the time with x transposed first. The barrier
  # keeps XLA from the product of y.T and x, where it wants the result transposed.
  return jax.lax.optimization_barrier(dot(transposed(x_MD), y_MF, -2))


def sums_of(dtype: Any) -> Any:
  """Returns the dtype in which to sum a result of `dtype`.

  XLA for CPUs also copies whole arrays of bfloat16 of which a slice is updated.
  """
  return jnp.float32 if dtype == jnp.bfloat16 else dtype


def transposed(x: jax.Array) -> jax.Array:
  """Returns x [..., M, D] as [..., D, M], which no dot takes back to contract the first dim."""
  y = x.swapaxes(-1, -2)
  if x.dtype != jnp.bfloat16 or mesh.sizes_here(mesh.AXES):
    return jax.lax.optimization_barrier(y)
  # Reshaped, it has the layout of any other array. (Sharded, it would be all-gathered for that.)
  return jax.lax.optimization_barrier(y.reshape(-1)).reshape(y.shape)
