# SPDX-License-Identifier: Apache-2.0
"""INT8 matmuls with dynamic scales (as in AQT: github.com/google/aqt).

Each vector along the contracted dim has a scale: the rows of x, the columns of w, and the rows (for
dx) or columns (for dw) of the cotangent. Operands are rounded to nearest, cotangents
stochastically, which keeps gradients unbiased. Sums are int32; results have the dtypes of the
operands. The residuals of the backward pass are the INT8 operands.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.layers.precision.matmul import Product
from paxlike.layers.precision.rounding import Rounded, Rounding, stochastic_round


@configurable
@dataclasses.dataclass(frozen=True)
class Int8:
  """A `Dot` in INT8."""

  def rounding(self, num_inputs: int, num_outputs: int) -> Rounding:
    return Rounding(_nearest, tuple(range(-num_inputs - num_outputs, -num_outputs)))

  def __call__(self, product: Product, x: jax.Array, w: jax.Array, rounded: Rounded) -> jax.Array:
    return _multiply(product, x, w, rounded)


@jax.custom_vjp
def _multiply(product: Product, x: jax.Array, w: jax.Array, rounded_w: Rounded) -> jax.Array:
  return _forward(product, x, w, rounded_w)[0]


def _forward(product, x, w, rounded_w):
  x8 = _nearest(x, (-1,))
  y = product.outputs(x8.values, rounded_w.values, jnp.int32)
  y = y * x8.scale * product.broadcast_scale(rounded_w.scale, y)
  return y.astype(x.dtype), (product, x8, rounded_w, jnp.zeros((), w.dtype))


def _backward(saved, dy):
  product, x8, rounded_w, like_w = saved
  # Scales along the contracted dim cannot be factored out: multiply the cotangent by them first.
  wide = product.mask_unused(dy).astype(jnp.float32)
  dy8 = _stochastic(wide * product.broadcast_scale(rounded_w.scale, dy), _amax_of_rows)
  dx = product.to_inputs(dy8.values, rounded_w.values, jnp.int32) * dy8.scale
  dy8 = _stochastic(wide * x8.scale, product.column_amax)
  dw = product.to_weights(x8.values, dy8.values, jnp.int32) * dy8.scale
  return None, dx.astype(dy.dtype), dw.astype(like_w.dtype), None


_multiply.defvjp(_forward, _backward)


def _nearest(x: jax.Array, axes: tuple[int, ...]) -> Rounded:
  scale = _scale(jnp.abs(x).max(axes, keepdims=True))
  return Rounded(jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale)


def _stochastic(x: jax.Array, largest: Any) -> Rounded:
  scale = _scale(largest(x))
  return Rounded(stochastic_round(x / scale).astype(jnp.int8), scale)


def _amax_of_rows(x: jax.Array) -> jax.Array:
  return jnp.abs(x).max(-1, keepdims=True)


def _scale(largest: jax.Array) -> jax.Array:
  largest = largest.astype(jnp.float32)
  return jnp.where(largest > 0, largest / 127, 1)
