# SPDX-License-Identifier: Apache-2.0
"""Products of matrices in 8-bit floating point (Micikevicius et al., 2022, arXiv:2209.05433)."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def fp8(x: jax.Array, w_DF: jax.Array) -> jax.Array:
  """Returns x [..., D] times w, [..., F] in x's dtype, with operands rounded to 8 bits.

  Operands are e4m3, what comes back from above is e5m2. Each is scaled, as a whole, by the power of
  two that brings its largest entry to the upper end of its format (current scaling). Sums are
  float32; weights and gradients stay in the dtypes they have. The backward pass finds the operands
  in 8 bits.
  """
  return _forward(x, w_DF)[0]


def _forward(x, w_DF):
  small_x, scale_x = rounded(x, jnp.float8_e4m3fn)
  small_w, scale_w = rounded(w_DF, jnp.float8_e4m3fn)
  y = _product(small_x, small_w, scale_x * scale_w, (x.ndim - 1,), (0,), x.dtype)
  # XLA would let cuBLAS apply a GELU and write x for its gradient, which it cannot do in 8 bits.
  y = jax.lax.optimization_barrier(y)
  return y, (small_x, scale_x, small_w, scale_w, jnp.zeros((), w_DF.dtype))


def _backward(saved, dy):
  small_x, scale_x, small_w, scale_w, like_w = saved
  small_dy, scale_dy = rounded(dy, jnp.float8_e5m2)
  leading = tuple(range(dy.ndim - 1))
  dx = _product(small_dy, small_w, scale_dy * scale_w, (dy.ndim - 1,), (1,), dy.dtype)
  dw = _product(small_x, small_dy, scale_x * scale_dy, leading, leading, like_w.dtype)
  return dx, dw


fp8.defvjp(_forward, _backward)


def rounded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
  """Returns x in an 8-bit dtype, and the float32 scalar to multiply that with."""
  largest = jnp.abs(x).max().astype(jnp.float32)
  _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
  scale = jnp.ldexp(jnp.float32(1), exponent)
  return (x.astype(jnp.float32) / scale).astype(dtype), scale


def _product(
  a: jax.Array,
  b: jax.Array,
  scale: jax.Array,
  over_a: tuple[int, ...],
  over_b: tuple[int, ...],
  dtype: Any,
) -> jax.Array:
  # In this form XLA gives the scale, which no dtype rounds, to cuBLAS. Before it is applied, sums
  # are too large for float16.
  wide = jnp.float32 if dtype == jnp.float16 else dtype
  y = jax.lax.dot_general(a, b, ((over_a, over_b), ((), ())), preferred_element_type=wide)
  return (y * scale.astype(wide)).astype(dtype)
