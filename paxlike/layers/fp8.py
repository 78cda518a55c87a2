# SPDX-License-Identifier: Apache-2.0
"""Products in 8-bit floating point (Micikevicius et al., 2022, arXiv:2209.05433).

Operands are e4m3, what comes back from above is e5m2. Each is scaled by a power of two, so that its
largest entry comes to the upper end of its format. Sums are float32; the results have the dtypes of
the operands. The backward pass finds the operands in 8 bits.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.configurable import configurable
from paxlike.layers import module
from paxlike.layers.products import Product
from paxlike.layers.rounding import Rounded, Rounding

_OPERAND, _GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


@configurable
@dataclasses.dataclass(frozen=True)
class Fp8:
  """A `Dot` whose scales are those of what is multiplied (current scaling)."""

  def rounding(self, num_inputs: int, num_outputs: int) -> Rounding:
    return Rounding(_rounded_weight, tuple(range(-num_inputs - num_outputs, 0)))

  def __call__(self, product: Product, x: jax.Array, w: jax.Array, rounded: Rounded) -> jax.Array:
    return _multiply(product, x, w, rounded, None)


@configurable
class DelayedFp8(module.Module):
  """A `Dot` whose scales of activations and gradients are those of the last steps.

  So what makes these can round them at once, where `Fp8` must first have seen all of an array. What
  is larger than in all those steps is cut off. The first step of a run has scales of 1.
  """

  def __init__(self, history: int = 16):
    """`history` is how many steps are looked back upon."""
    self.inputs = self.statistic({"history": history}, update=_remember)
    self.gradients = self.statistic({"history": history}, update=_remember)

  def rounding(self, num_inputs: int, num_outputs: int) -> Rounding:
    return Fp8().rounding(num_inputs, num_outputs)

  def __call__(self, product: Product, x: jax.Array, w: jax.Array, rounded: Rounded) -> jax.Array:
    return _multiply(product, x, w, rounded, _Seen(self.inputs[...], self.gradients[...]))


class _Seen(NamedTuple):
  """The largest entries of the last steps, the newest first, float32; the gradient is the next."""

  inputs: jax.Array
  gradients: jax.Array


def _remember(seen: jax.Array, newest: jax.Array) -> jax.Array:
  return jnp.concatenate([newest[..., :1], seen[..., :-1]], -1)


@jax.custom_vjp
def _multiply(
  product: Product, x: jax.Array, w: jax.Array, rounded_w: Rounded, seen: _Seen | None
) -> jax.Array:
  return _forward(product, x, w, rounded_w, seen)[0]


def _forward(product, x, w, rounded_w, seen):
  x = product.used(x)
  small_x = rounded(x, _OPERAND, None if seen is None else seen.inputs)
  y = product.outputs(small_x.values, rounded_w.values, _wide(x))
  y = _scaled(y, small_x.scale * product.of_rows(rounded_w.scale, y), x.dtype)
  # XLA would let cuBLAS apply a GELU and write x for its gradient, which it cannot do in 8 bits.
  y = jax.lax.optimization_barrier(y)
  largest_x = None if seen is None else _largest(x)
  return y, (product, small_x, rounded_w, seen, largest_x, jnp.zeros((), w.dtype))


def _backward(saved, dy):
  product, small_x, rounded_w, seen, largest_x, like_w = saved
  dy = product.used(dy)
  small_dy = rounded(dy, _GRADIENT, None if seen is None else seen.gradients)
  dx = product.to_inputs(small_dy.values, rounded_w.values, _wide(dy))
  dx = _scaled(dx, small_dy.scale * product.of_rows(rounded_w.scale, dy), dy.dtype)
  dw = product.to_weights(small_x.values, small_dy.values, _wide(like_w))
  dw = _scaled(dw, small_x.scale * small_dy.scale, like_w.dtype)
  if seen is None:
    return None, dx, dw, None, None
  newest = (largest_x, _largest(dy))
  found = (jnp.zeros_like(old).at[0].set(new) for old, new in zip(seen, newest, strict=True))
  return None, dx, dw, None, _Seen(*found)


_multiply.defvjp(_forward, _backward)


def rounded(x: jax.Array, dtype: Any, seen: jax.Array | None = None) -> Rounded:
  """Returns x in an 8-bit dtype, its scale a scalar.

  That is of the largest entry of x or, if they are given, of those that were seen before.
  """
  if seen is None:
    scale = _scale(_largest(x), dtype)
    return Rounded((x.astype(jnp.float32) / scale).astype(dtype), scale)
  scale = jnp.where(seen.max() > 0, _scale(seen.max(), dtype), 1)
  top = float(jnp.finfo(dtype).max)
  return Rounded(jnp.clip(x.astype(jnp.float32) / scale, -top, top).astype(dtype), scale)


def _rounded_weight(w: jax.Array, axes: tuple[int, ...]) -> Rounded:
  scale = _scale(jnp.abs(w).max(axes, keepdims=True).astype(jnp.float32), _OPERAND)
  return Rounded((w.astype(jnp.float32) / scale).astype(_OPERAND), scale)


def _largest(x: jax.Array) -> jax.Array:
  return jnp.abs(x).max().astype(jnp.float32)


def _scale(largest: jax.Array, dtype: Any) -> jax.Array:
  _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
  return jnp.ldexp(jnp.float32(1), exponent)


def _wide(x: jax.Array) -> Any:
  # Before they are scaled, sums are too large for float16.
  return jnp.float32 if x.dtype == jnp.float16 else x.dtype


def _scaled(y: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
  # In this form XLA gives a scalar, which no dtype rounds, to cuBLAS.
  scale = scale.reshape(()) if scale.size == 1 else scale
  return (y * scale.astype(y.dtype)).astype(dtype)
