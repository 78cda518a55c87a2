# SPDX-License-Identifier: Apache-2.0
"""Weight-only quantization to 8 or 4 bits, for frozen weights.

LoRA adapters may be trained on top (QLoRA; Dettmers et al., 2023, arXiv:2305.14314). A weight is
split into blocks along one dim, each with a float32 scale.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.precision import cpu_dots

_BLOCK = 64
_INT4_BLOCK = 128
# With fewer tokens, XLA for GPUs materializes the dequantized weight.
_MIN_TOKENS = 8
# The quantiles of a normal distribution, from appendix E of arXiv:2305.14314.
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
  """A quantized weight; a pytree.

  Attributes:
    values: The quantized numbers.
    scales: float32, of the weight's shape, but with the number of blocks in dim `axis`.
    axis: The dim that is split into blocks; negative, since layers may be stacked in a leading dim.
  """

  values: jax.Array
  scales: jax.Array
  axis: int

  @abc.abstractmethod
  def dequantized(self, dtype: Any) -> jax.Array:
    """Returns the dequantized weight in `dtype`."""

  def _scaled(self, x: jax.Array) -> jax.Array:
    blocks = _blocks(x, self.axis, self.scales.shape[self.axis])
    return (blocks * jnp.expand_dims(self.scales, self.axis)).reshape(x.shape)


def dense(w: Any, dtype: Any) -> jax.Array:
  """Returns a weight as a dense array in `dtype`, dequantized if it is quantized."""
  return w.dequantized(dtype) if isinstance(w, Quantized) else w.astype(dtype)


def _products(x_MGK: jax.Array, numbers_GKF: jax.Array) -> jax.Array:
  """Returns the products of each block with the block's integers [G, M, F], float32."""
  num_tokens, num_blocks, _ = x_MGK.shape
  if cpu_dots.has_few(num_tokens):
    return cpu_dots.dot_of_integers(x_MGK.swapaxes(0, 1), numbers_GKF.astype(jnp.int8))
  if num_blocks > 1:
    x_MGK = jnp.pad(x_MGK, ((0, max(_MIN_TOKENS - num_tokens, 0)), (0, 0), (0, 0)))
  numbers_GKF = numbers_GKF.astype(x_MGK.dtype)
  y_GMF = jnp.einsum("MGK,GKF->GMF", x_MGK, numbers_GKF, preferred_element_type=jnp.float32)
  return y_GMF[:, :num_tokens]


@_pytree
class Int8Weight(Quantized):
  """Integers from -127 to 127; `values` is int8 and has the weight's shape."""

  def dequantized(self, dtype: Any) -> jax.Array:
    return self._scaled(self._numbers().astype(jnp.float32)).astype(dtype)

  def reads_less(self, num_tokens: int) -> bool:
    """Returns whether `multiply` moves fewer bytes than dequantizing, for this many tokens."""
    return 2 * num_tokens <= self.values.shape[self.axis] // self.scales.shape[self.axis]

  def multiply(self, x_MK: jax.Array) -> jax.Array:
    """Returns x times the weight, flattened to [K, F], in the dtype of x.

    Scales multiply the sums over each block, not the weight, so GPUs read only int8 or int4.
    """
    num_tokens, num_inputs = x_MK.shape
    numbers = self._numbers()
    num_blocks = num_inputs * self.scales.size // numbers.size
    numbers_GKF = numbers.reshape(num_blocks, num_inputs // num_blocks, -1)
    scales_GF = self.scales.reshape(num_blocks, -1)
    if cpu_dots.reads_once(num_tokens, num_inputs // num_blocks):
      x_GK, numbers_GKF = x_MK.reshape(num_blocks, -1), numbers_GKF.astype(jnp.int8)
      return cpu_dots.dot_of_one_row(x_GK, numbers_GKF, scales_GF)[None].astype(x_MK.dtype)
    y_GMF = _products(x_MK.reshape(num_tokens, num_blocks, -1), numbers_GKF)
    return (y_GMF * scales_GF[:, None]).sum(0).astype(x_MK.dtype)

  def _numbers(self) -> jax.Array:
    return self.values


@_pytree
class Int4Weight(Int8Weight):
  """Integers from -7 to 7; `values` is int8 and packs two of them along the last dim."""

  def _numbers(self) -> jax.Array:
    pairs = jax.lax.bitcast_convert_type(self.values, jnp.int4)
    # Without a barrier, XLA fails when it fuses this with a matmul.
    return jax.lax.optimization_barrier(pairs.reshape(*self.values.shape[:-1], -1))


@_pytree
class Nf4Weight(Quantized):
  """NF4: indexes of 16 quantiles; `values` is uint8 and packs two of them along the last dim."""

  def dequantized(self, dtype: Any) -> jax.Array:
    pairs = jnp.stack([self.values & 15, self.values >> 4], -1)
    numbers = pairs.reshape(*self.values.shape[:-1], -1)
    return self._scaled(jnp.array(_NF4)[numbers]).astype(dtype)


@dataclasses.dataclass(frozen=True)
class WeightQuantizer:
  """A quantization scheme (a function below), with the dim that is split into blocks."""

  scheme: Callable[..., Quantized]
  axis: int

  def __call__(self, w: jax.Array) -> Quantized:
    return _stored(self, w)


@functools.partial(jax.jit, static_argnums=0)
def _stored(quantizer: WeightQuantizer, w: jax.Array) -> Quantized:
  return quantizer.scheme(w, axis=quantizer.axis)


@configurable(name="weight_only.int8")
def int8(w: jax.Array, *, axis: int) -> Int8Weight:
  """Rounds to 255 levels with a scale per block of up to 64."""
  return Int8Weight(*_integers(w, axis, _BLOCK, jnp.int8), axis)


@configurable(name="weight_only.int8_columns")
def int8_columns(w: jax.Array, *, axis: int) -> Int8Weight:
  """Rounds to 255 levels with one scale along the whole dim (per output column)."""
  return Int8Weight(*_integers(w, axis, w.shape[axis], jnp.int8), axis)


@configurable(name="weight_only.int4")
def int4(w: jax.Array, *, axis: int) -> Int4Weight:
  """Rounds to 15 levels with a scale per block of up to 128.

  Raises:
    UserError: The last dim is odd.
  """
  _check_pairs(w, "int4")
  numbers, scales = _integers(w, axis, _INT4_BLOCK, jnp.int4)
  pairs = numbers.reshape(*w.shape[:-1], -1, 2)
  return Int4Weight(jax.lax.bitcast_convert_type(pairs, jnp.int8), scales, axis)


def _integers(w: jax.Array, axis: int, size: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
  blocks, scales = _scaled_to_one(w, axis, size)
  most = jnp.iinfo(dtype).max
  return jnp.round(blocks * most).astype(dtype).reshape(w.shape), scales / most


def _check_pairs(w: jax.Array, name: str):
  if w.shape[-1] % 2:
    raise UserError(
      f"{name} packs two numbers into a byte, but a weight is {list(w.shape)}: use int8."
    )


@configurable(name="weight_only.nf4")
def nf4(w: jax.Array, *, axis: int) -> Nf4Weight:
  """Rounds to 16 quantiles of a normal distribution with a scale per block of up to 64.

  Raises:
    UserError: The last dim is odd.
  """
  _check_pairs(w, "nf4")
  blocks, scales = _scaled_to_one(w, axis, _BLOCK)
  levels = jnp.array(_NF4)
  numbers = jnp.searchsorted((levels[1:] + levels[:-1]) / 2, blocks.reshape(w.shape))
  low, high = jnp.moveaxis(numbers.astype(jnp.uint8).reshape(*w.shape[:-1], -1, 2), -1, 0)
  return Nf4Weight(low | (high << 4), scales, axis)


def _scaled_to_one(w: jax.Array, axis: int, most: int) -> tuple[jax.Array, jax.Array]:
  """Returns blocks of up to `most` entries, each normalized to an amax of 1, and their scales."""
  size = math.gcd(w.shape[axis], most)
  blocks = _blocks(w.astype(jnp.float32), axis, w.shape[axis] // size)
  scales = jnp.abs(blocks).max(axis, keepdims=True)
  return blocks / jnp.where(scales, scales, 1), scales.squeeze(axis)


def _blocks(x: jax.Array, axis: int, count: int) -> jax.Array:
  """Splits the dim `axis` of x into `count` blocks, in a new dim before `axis`."""
  at = x.ndim + axis
  return x.reshape(*x.shape[:at], count, -1, *x.shape[at + 1 :])


@jax.jit
def squares(w: jax.Array, quantized: Quantized) -> tuple[jax.Array, jax.Array]:
  """Returns the sums of squares of the quantization error and of the weight."""
  w = w.astype(jnp.float32)
  return jnp.square(w - quantized.dequantized(jnp.float32)).sum(), jnp.square(w).sum()
