# SPDX-License-Identifier: Apache-2.0
"""Products in whole numbers of 8 bits (as AQT has them: github.com/google/aqt).

Every row of x, column of w, and row or column of what comes back from above, whichever is not
summed over, has a scale of its own. Operands are rounded to the nearest number, gradients by
chance, so that they are right on average. Sums are int32; the results have the dtypes of the
operands. The backward pass finds the operands in 8 bits.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.configurable import configurable
from paxlike.layers.products import Product
from paxlike.layers.rounding import Rounded, Rounding, by_chance


@configurable
@dataclasses.dataclass(frozen=True)
class Int8:
  """A `Dot`."""

  def rounding(self, num_inputs: int, num_outputs: int) -> Rounding:
    return Rounding(_nearest, tuple(range(-num_inputs - num_outputs, -num_outputs)))

  def __call__(self, product: Product, x: jax.Array, w: jax.Array, rounded: Rounded) -> jax.Array:
    return _multiply(product, x, w, rounded)


@jax.custom_vjp
def _multiply(product: Product, x: jax.Array, w: jax.Array, rounded_w: Rounded) -> jax.Array:
  return _forward(product, x, w, rounded_w)[0]


def _forward(product, x, w, rounded_w):
  small_x = _nearest(x, (-1,))
  y = product.outputs(small_x.values, rounded_w.values, jnp.int32)
  y = y * small_x.scale * product.of_rows(rounded_w.scale, y)
  return y.astype(x.dtype), (product, small_x, rounded_w, jnp.zeros((), w.dtype))


def _backward(saved, dy):
  product, small_x, rounded_w, like_w = saved
  # The scales of what is summed over go with the gradient, before it is rounded.
  wide = product.used(dy).astype(jnp.float32)
  small_dy = _by_chance(wide * product.of_rows(rounded_w.scale, dy), _largest_of_columns)
  dx = product.to_inputs(small_dy.values, rounded_w.values, jnp.int32) * small_dy.scale
  small_dy = _by_chance(wide * small_x.scale, product.largest_of_rows)
  dw = product.to_weights(small_x.values, small_dy.values, jnp.int32) * small_dy.scale
  return None, dx.astype(dy.dtype), dw.astype(like_w.dtype), None


_multiply.defvjp(_forward, _backward)


def _nearest(x: jax.Array, axes: tuple[int, ...]) -> Rounded:
  scale = _scale(jnp.abs(x).max(axes, keepdims=True))
  return Rounded(jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale)


def _by_chance(x: jax.Array, largest: Any) -> Rounded:
  scale = _scale(largest(x))
  return Rounded(by_chance(x / scale).astype(jnp.int8), scale)


def _largest_of_columns(x: jax.Array) -> jax.Array:
  return jnp.abs(x).max(-1, keepdims=True)


def _scale(largest: jax.Array) -> jax.Array:
  largest = largest.astype(jnp.float32)
  return jnp.where(largest > 0, largest / 127, 1)
