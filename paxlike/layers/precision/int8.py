# SPDX-License-Identifier: Apache-2.0
"""INT8 matmuls with dynamic scales (as in AQT: github.com/google/aqt).

Each vector along the contracted dim has a scale: the rows of x, the columns of w, and the rows (for
dx) or columns (for dw) of the cotangent. Operands are rounded to nearest, cotangents
stochastically, which keeps gradients unbiased. Sums are int32; results have the dtypes of the
operands. The residuals of the backward pass are the INT8 operands.
"""

import dataclasses

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.layers.precision.matmul import Dot, MatmulForm
from paxlike.layers.precision.rounding import QuantizedOperand, stochastic_round


@configurable
@dataclasses.dataclass(frozen=True)
class Int8(Dot):
  """A `Dot` in INT8."""

  @property
  def operands(self) -> str:
    return "int8"

  def quantized(self, w: jax.Array) -> QuantizedOperand:
    return _nearest(w, -2)

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    return _multiply(form, x, w, w8)


@jax.custom_vjp
def _multiply(
  form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None
) -> jax.Array:
  return _forward(form, x, w, w8)[0]


def _forward(form, x, w, w8):
  w8 = _nearest(w, -2) if w8 is None else w8
  x8 = _nearest(x, -1)
  y = form.outputs(x8.values, w8.values, jnp.int32)
  y = y * x8.scale * form.broadcast_scale(w8.scale, y)
  return y.astype(x.dtype), (form, x8, w8, jnp.zeros((), w.dtype))


def _backward(saved, dy):
  form, x8, w8, like_w = saved
  # A scale along the contracted dim cannot be factored out: multiply the cotangent by it first.
  wide = dy.astype(jnp.float32)
  to_dx = wide * form.broadcast_scale(w8.scale, dy)
  dy8 = _stochastic(to_dx, jnp.abs(to_dx).max(-1, keepdims=True))
  dx = form.to_inputs(dy8.values, w8.values, jnp.int32) * dy8.scale
  to_dw = wide * x8.scale
  dy8 = _stochastic(to_dw, _column_amax(to_dw, w8.values))
  dw = form.to_weights(x8.values, dy8.values, jnp.int32) * dy8.scale
  return None, dx.astype(dy.dtype), dw.astype(like_w.dtype), None


_multiply.defvjp(_forward, _backward)


def _nearest(x: jax.Array, axis: int) -> QuantizedOperand:
  scale = _scale(jnp.abs(x).max(axis, keepdims=True))
  return QuantizedOperand(jnp.round(x.astype(jnp.float32) / scale).astype(jnp.int8), scale)


def _stochastic(x: jax.Array, largest: jax.Array) -> QuantizedOperand:
  scale = _scale(largest)
  return QuantizedOperand(stochastic_round(x / scale).astype(jnp.int8), scale)


def _column_amax(dy: jax.Array, w: jax.Array) -> jax.Array:
  """Returns the amax over tokens of each column of dy, broadcastable to dy and to w."""
  if dy.ndim == w.ndim == 3:  # [E, C, F] and [E, D, F].
    return jnp.abs(dy).max(1, keepdims=True)
  return jnp.abs(dy).max(tuple(range(dy.ndim - 1)))


def _scale(largest: jax.Array) -> jax.Array:
  largest = largest.astype(jnp.float32)
  return jnp.where(largest > 0, largest / 127, 1)
