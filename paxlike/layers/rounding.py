# SPDX-License-Identifier: Apache-2.0
"""Numbers in 8 bits beside the scales that bring them back, and rounding by chance."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.layers.quantization import Quantized


class Rounded(NamedTuple):
  """An array, nearly: `values` in 8 bits times `scale`, float32, which broadcasts to it."""

  values: jax.Array
  scale: jax.Array

  def matrix(self, rows: int) -> "Rounded":
    """Returns a weight with its dims joined to [rows, columns]."""
    return Rounded(self.values.reshape(rows, -1), self.scale.reshape(1, -1))


class Prepared(NamedTuple):
  """A weight and what it is multiplied as; gradients are those of `whole`, which is not read."""

  whole: jax.Array
  rounded: Rounded


def whole(w: Any, dtype: Any) -> jax.Array:
  """Returns a weight as one array, however it is held."""
  if isinstance(w, Quantized):
    return w.dequantized(dtype)
  return (w.whole if isinstance(w, Prepared) else w).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Rounding:
  """How a weight is rounded, once a step.

  Attributes:
    function: Of the weight and `axes`.
    axes: The dims that share a scale, counted from the end, as layers may be stacked in front.
  """

  function: Callable[[jax.Array, tuple[int, ...]], Rounded]
  axes: tuple[int, ...]

  def __call__(self, w: jax.Array) -> Rounded:
    return self.function(jax.lax.stop_gradient(w), self.axes)

  def of(self, w: Any, dense: jax.Array) -> Rounded:
    """Returns what a weight is multiplied as: what was made for this step or, else, of `dense`."""
    return w.rounded if isinstance(w, Prepared) else self(dense)


def by_chance(x: jax.Array) -> jax.Array:
  """Returns float32 x rounded to whole numbers, up as probably as it lies near the upper one.

  The chance is a hash of each number, as bfloat16, and its place. So no key is needed, and where
  devices add up in another order nearly all numbers are rounded alike.
  """
  coarse = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
  return jnp.floor(x + (hashed(coarse) >> 8).astype(jnp.float32) * 2.0**-24)


def in_dtype(x: jax.Array, dtype: Any, *, draw: jax.Array) -> jax.Array:
  """Returns float32 x in `dtype`; bfloat16 is rounded by chance, another one for each `draw`.

  So what is added many times is not lost for being less than half of the last bit.
  """
  if dtype != jnp.bfloat16:
    return x.astype(dtype)
  bits: Any = jax.lax.bitcast_convert_type(x, jnp.uint32)
  upper = (bits + (hashed(bits ^ hashed(draw)) >> 16)) & jnp.uint32(0xFFFF0000)
  rounded = jax.lax.bitcast_convert_type(jnp.where(jnp.isfinite(x), upper, bits), jnp.float32)
  return rounded.astype(dtype)


def hashed(bits: jax.Array) -> jax.Array:
  """Returns uint32 bits that look random, for each number of uint32 or less and its place.

  The last steps are those of MurmurHash3 (Appleby, 2011).
  """
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis in range(bits.ndim):
    stride = math.prod(bits.shape[axis + 1 :]) * 0x9E3779B1 % 2**32
    place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis) * jnp.uint32(stride)
  bits = bits.astype(jnp.uint32) ^ place
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
  return bits ^ (bits >> 16)
