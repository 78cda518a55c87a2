# SPDX-License-Identifier: Apache-2.0
"""What one weight is used for many times, with a gradient that is summed up in float32.

JAX would sum it in the dtype of the layers: in bfloat16, what is less than 1/512 of a sum is lost.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def add(x: jax.Array, b: jax.Array) -> jax.Array:
  """Returns x + b in the dtype of x, for a b that is broadcast to x."""
  return x + b.astype(x.dtype)


def _add_backward(b: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
  sizes = (1,) * (dy.ndim - b.ndim) + b.shape
  axes = [axis for axis, size in enumerate(sizes) if size != dy.shape[axis]]
  return dy, dy.astype(jnp.float32).sum(axes).reshape(b.shape).astype(b.dtype)


add.defvjp(lambda x, b: (add(x, b), b), _add_backward)


@jax.custom_vjp
def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
  """Returns [..., D] for int32 rows [...] of a table [V, D]; rows are in [0, V)."""
  return table[rows]


def _lookup_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, None]:
  table, rows = saved
  zeros = jnp.zeros(table.shape, jnp.float32)
  return zeros.at[rows].add(dy.astype(jnp.float32)).astype(table.dtype), None


lookup.defvjp(lambda table, rows: (lookup(table, rows), (table, rows)), _lookup_backward)
