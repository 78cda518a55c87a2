# SPDX-License-Identifier: Apache-2.0
"""Frozen weights in 8 or 4 bits, beside which adapters are trained (QLoRA; Dettmers et al., 2023).

A weight is cut into blocks of up to 64 along one of its dims, each with a float32 scale of its own.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.errors import UserError

_BLOCK = 64
# The quantiles of a normal distribution that arXiv:2305.14314 gives in its appendix E.
_NF4 = (
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
  -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
  0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
  0.7229568362236023, 1.0,
)  # fmt: skip

_pytree = functools.partial(
  jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("axis",)
)


@dataclasses.dataclass(frozen=True)
class Quantized(abc.ABC):
  """A weight in few bits; a pytree.

  Attributes:
    values: What is left of the weight.
    scales: float32, as the weight but for the dim `axis`, which has as many as there are blocks.
    axis: Along which blocks lie; counted from the end, as layers may be stacked in front.
  """

  values: jax.Array
  scales: jax.Array
  axis: int

  @abc.abstractmethod
  def dequantized(self, dtype: Any) -> jax.Array:
    """Returns the weight, nearly."""

  def _scaled(self, x: jax.Array) -> jax.Array:
    blocks = _blocks(x, self.axis, self.scales.shape[self.axis])
    return (blocks * jnp.expand_dims(self.scales, self.axis)).reshape(x.shape)


@_pytree
class Int8(Quantized):
  """Whole numbers from -127 to 127: `values` is int8, and of the weight's shape."""

  def dequantized(self, dtype: Any) -> jax.Array:
    return self._scaled(self.values.astype(jnp.float32)).astype(dtype)


@_pytree
class Nf4(Quantized):
  """Numbers of 16 quantiles: `values` is uint8, two to each along the last dim."""

  def dequantized(self, dtype: Any) -> jax.Array:
    pairs = jnp.stack([self.values & 15, self.values >> 4], -1)
    numbers = pairs.reshape(*self.values.shape[:-1], -1)
    return self._scaled(jnp.array(_NF4)[numbers]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Storage:
  """A scheme, one of the functions below, for weights whose blocks lie along `axis`."""

  scheme: Callable[..., Quantized]
  axis: int

  def __call__(self, w: jax.Array) -> Quantized:
    return _stored(self, w)


@functools.partial(jax.jit, static_argnums=0)
def _stored(storage: Storage, w: jax.Array) -> Quantized:
  return storage.scheme(w, axis=storage.axis)


def int8(w: jax.Array, *, axis: int) -> Int8:
  """Rounds to 255 levels of the largest entry of each block."""
  blocks, scales = _scaled_to_one(w, axis)
  values = jnp.round(blocks * 127).astype(jnp.int8).reshape(w.shape)
  return Int8(values, scales / 127, axis)


def nf4(w: jax.Array, *, axis: int) -> Nf4:
  """Rounds to 16 quantiles of a normal distribution, scaled by the largest entry of each block.

  Raises:
    UserError: The last dim is odd.
  """
  if w.shape[-1] % 2:
    raise UserError(f"nf4 has two numbers in a byte, but a weight is {list(w.shape)}: take int8.")
  blocks, scales = _scaled_to_one(w, axis)
  levels = jnp.array(_NF4)
  numbers = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, blocks.reshape(w.shape))
  low, high = jnp.moveaxis(numbers.astype(jnp.uint8).reshape(*w.shape[:-1], -1, 2), -1, 0)
  return Nf4(low | (high << 4), scales, axis)


def _scaled_to_one(w: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
  """Returns blocks of which each has a largest entry of 1, and the scales of the blocks."""
  size = math.gcd(w.shape[axis], _BLOCK)
  blocks = _blocks(w.astype(jnp.float32), axis, w.shape[axis] // size)
  scales = jnp.abs(blocks).max(axis, keepdims=True)
  return blocks / jnp.where(scales, scales, 1), scales.squeeze(axis)


def _blocks(x: jax.Array, axis: int, count: int) -> jax.Array:
  """Cuts the dim `axis` of x into `count` blocks: the dim before `axis` of the result."""
  at = x.ndim + axis
  return x.reshape(*x.shape[:at], count, -1, *x.shape[at + 1 :])


@jax.jit
def squares(w: jax.Array, quantized: Quantized) -> tuple[jax.Array, jax.Array]:
  """Returns the sums of squares of what a weight loses, and of the weight."""
  w = w.astype(jnp.float32)
  return jnp.square(w - quantized.dequantized(jnp.float32)).sum(), jnp.square(w).sum()
