# SPDX-License-Identifier: Apache-2.0
"""Quantized arrays with their scales, and stochastic rounding."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class QuantizedOperand(NamedTuple):
  """A quantized array: 8-bit `values` times a float32 `scale` that broadcasts to them."""

  values: jax.Array
  scale: jax.Array


def stochastic_round(x: jax.Array) -> jax.Array:
  """Returns float32 x stochastically rounded to whole numbers.

  The random bits are a hash of each number, as bfloat16, and its index. So no key is needed, and
  nearly all numbers still round the same way if devices sum them in another order.
  """
  coarse = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
  return jnp.floor(x + (hashed(coarse) >> 8).astype(jnp.float32) * 2.0**-24)


def in_dtype(x: jax.Array, dtype: Any, *, draw: jax.Array) -> jax.Array:
  """Returns float32 x in `dtype`; to bfloat16 with stochastic rounding, seeded by `draw`.

  Rounding to nearest would lose repeated updates smaller than half of the last bit.
  """
  if dtype != jnp.bfloat16:
    return x.astype(dtype)
  bits: Any = jax.lax.bitcast_convert_type(x, jnp.uint32)
  upper = (bits + (hashed(bits ^ hashed(draw)) >> 16)) & jnp.uint32(0xFFFF0000)
  rounded = jax.lax.bitcast_convert_type(jnp.where(jnp.isfinite(x), upper, bits), jnp.float32)
  return rounded.astype(dtype)


def hashed(bits: jax.Array) -> jax.Array:
  """Returns pseudo-random uint32 bits: a hash of each unsigned number and its index.

  The finalizer is that of MurmurHash3 (Appleby, 2011).
  """
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis in range(bits.ndim):
    stride = math.prod(bits.shape[axis + 1 :]) * 0x9E3779B1 % 2**32
    place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
  bits = bits.astype(jnp.uint32) ^ place
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
  return bits ^ (bits >> 16)
