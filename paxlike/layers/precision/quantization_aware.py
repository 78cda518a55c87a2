# SPDX-License-Identifier: Apache-2.0
"""Quantization-aware training: matmuls with weights as they will be after weight-only quantization.

The forward and backward passes multiply by the dequantized weight; its gradient goes to the weight
itself (straight-through estimator; Bengio et al., 2013, arXiv:1308.3432). `paxlike-convert` exports
the weights by the rules below.
"""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.precision.matmul import Dot, MatmulForm
from paxlike.layers.precision.rounding import QuantizedOperand

INT4_GROUP = 128
FP8_BLOCK = 128
_FP8_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)


class Rounded(NamedTuple):
  """A quantized matrix [..., D, F].

  Attributes:
    values: int8 or float8_e4m3fn, of the weight's shape.
    scales: float32 [..., D / block, F / block], for blocks of any size.
  """

  values: jax.Array
  scales: jax.Array


class Rule(abc.ABC):
  """A rule of symmetric weight-only quantization, which has no zero points."""

  @abc.abstractmethod
  def round(self, w_DF: jax.Array) -> Rounded:
    """Returns matrices [..., D, F] quantized.

    Raises:
      UserError: The rule cannot quantize a matrix of this shape.
    """

  @abc.abstractmethod
  def dequantized(self, rounded: Rounded) -> jax.Array:
    """Returns float32 matrices [..., D, F]."""


@dataclasses.dataclass(frozen=True)
class Integers(Rule):
  """Signed integers of `bits` bits, symmetric around 0; scales are rounded to bfloat16.

  Attributes:
    bits: 8 or 4.
    group: Number of entries along D that share a scale; None: all of an output.
  """

  bits: int
  group: int | None = None

  def round(self, w_DF: jax.Array) -> Rounded:
    D, F = w_DF.shape[-2:]
    group = self.group or D
    if D % group:
      raise UserError(
        f"{self.bits}-bit quantization has groups of {group} weights, but a linear map has {D}"
        " inputs: choose sizes that are multiples of it, or 8 bits."
      )
    most = 2 ** (self.bits - 1) - 1
    w_GgF = w_DF.astype(jnp.float32).reshape(*w_DF.shape[:-2], D // group, group, F)
    scales = _or_one(jnp.abs(w_GgF).max(-2) / most)
    # Exports in bfloat16 have the same scales.
    scales = scales.astype(jnp.bfloat16).astype(jnp.float32)
    numbers = jnp.clip(jnp.round(w_GgF / scales[..., None, :]), -most, most)
    return Rounded(numbers.astype(jnp.int8).reshape(w_DF.shape), scales)

  def dequantized(self, rounded: Rounded) -> jax.Array:
    values, scales = rounded
    blocks = values.reshape(*scales.shape[:-1], -1, scales.shape[-1]).astype(jnp.float32)
    return (blocks * scales[..., None, :]).reshape(values.shape)


@dataclasses.dataclass(frozen=True)
class Fp8Outputs(Rule):
  """FP8 (E4M3) with a scale per output."""

  def round(self, w_DF: jax.Array) -> Rounded:
    w = w_DF.astype(jnp.float32)
    scales = _or_one(jnp.abs(w).max(-2, keepdims=True) / _FP8_MAX)
    return Rounded(_fp8(w / scales), scales)

  def dequantized(self, rounded: Rounded) -> jax.Array:
    return rounded.values.astype(jnp.float32) * rounded.scales


@dataclasses.dataclass(frozen=True)
class Fp8Blocks(Rule):
  """FP8 (E4M3) with a scale per block of 128 x 128 (DeepSeek-AI, 2024, arXiv:2412.19437)."""

  def round(self, w_DF: jax.Array) -> Rounded:
    w = w_DF.astype(jnp.float32)
    pads = [(0, 0)] * (w.ndim - 2) + [(0, -size % FP8_BLOCK) for size in w.shape[-2:]]
    padded = jnp.pad(w, pads)
    D, F = (size // FP8_BLOCK for size in padded.shape[-2:])
    blocks = padded.reshape(*w.shape[:-2], D, FP8_BLOCK, F, FP8_BLOCK)
    scales = _or_one(jnp.abs(blocks).max((-3, -1)) / _FP8_MAX)
    return Rounded(_fp8(w / _spread(scales, w.shape)), scales)

  def dequantized(self, rounded: Rounded) -> jax.Array:
    values, scales = rounded
    return values.astype(jnp.float32) * _spread(scales, values.shape)


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns the scale of each entry of matrices of a shape, for square blocks."""
  wide = jnp.repeat(jnp.repeat(scales, FP8_BLOCK, -2), FP8_BLOCK, -1)
  return wide[..., : shape[-2], : shape[-1]]


def _fp8(x: jax.Array) -> jax.Array:
  return jnp.clip(x, -_FP8_MAX, _FP8_MAX).astype(jnp.float8_e4m3fn)


def _or_one(scales: jax.Array) -> jax.Array:
  """Returns scales with 1 for blocks of zeros."""
  return jnp.where(scales > 0, scales, 1)


INT8 = Integers(8)
INT4 = Integers(4, INT4_GROUP)
FP8 = Fp8Outputs()
FP8_BLOCKS = Fp8Blocks()


@functools.partial(jax.jit, static_argnums=0)
def rounded(rule: Rule, w_DF: jax.Array) -> Rounded:
  """Returns `rule.round(w_DF)`, compiled."""
  return rule.round(w_DF)


@dataclasses.dataclass(frozen=True)
class QuantizationAware(Dot):
  """A `Dot` in the compute dtype, with weights rounded by a rule."""

  rule: ClassVar[Rule]

  @property
  def operands(self) -> None:
    return None

  def quantized(self, w: jax.Array) -> QuantizedOperand:
    """Returns the dequantized weight, with scales of 1."""
    values = self.rule.dequantized(self.rule.round(w)).astype(w.dtype)
    return QuantizedOperand(values, jnp.ones_like(w[..., :1, :], jnp.float32))

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    return _multiply(form, x, w, self.quantized(w) if w8 is None else w8)


@configurable
@dataclasses.dataclass(frozen=True)
class QatInt8(QuantizationAware):
  """8-bit integers with a scale per output."""

  rule: ClassVar[Rule] = INT8


@configurable
@dataclasses.dataclass(frozen=True)
class QatInt4(QuantizationAware):
  """4-bit integers with a scale per output and 128 inputs."""

  rule: ClassVar[Rule] = INT4


@configurable
@dataclasses.dataclass(frozen=True)
class QatFp8(QuantizationAware):
  """FP8 with a scale per output."""

  rule: ClassVar[Rule] = FP8


@configurable
@dataclasses.dataclass(frozen=True)
class QatFp8Blocks(QuantizationAware):
  """FP8 with a scale per block of 128 x 128."""

  rule: ClassVar[Rule] = FP8_BLOCKS


@jax.custom_vjp
def _multiply(form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand) -> jax.Array:
  return _forward(form, x, w, w8)[0]


def _forward(form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand) -> Any:
  y = form.outputs(x, w8.values, x.dtype)
  return y, (form, x, w8, jnp.zeros((), w.dtype))


def _backward(saved: Any, dy: jax.Array) -> Any:
  form, x, w8, like_w = saved
  dx = form.to_inputs(dy, w8.values, dy.dtype)
  return None, dx, form.to_weights(x, dy, like_w.dtype), None


_multiply.defvjp(_forward, _backward)
