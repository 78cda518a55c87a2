# SPDX-License-Identifier: Apache-2.0
"""Matmuls in 8-bit floating point (Micikevicius et al., 2022, arXiv:2209.05433).

Operands are e4m3, cotangents e5m2. Each is scaled by a power of two that brings its amax (largest
absolute value) within a factor of two of the format's maximum. Sums are float32; results have the
dtypes of the operands. The residuals of the backward pass are the FP8 operands.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.devices import mesh, topology
from paxlike.layers.precision.matmul import Dot, MatmulForm
from paxlike.layers.precision.rounding import QuantizedOperand

_OPERAND, _GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


@configurable
@dataclasses.dataclass(frozen=True)
class Fp8(Dot):
  """A `Dot` with current scaling: scales come from the current amax of each operand."""

  @property
  def operands(self) -> str:
    return "fp8"

  @staticmethod
  def quantized(w: jax.Array) -> QuantizedOperand:
    scale = _scale(jnp.abs(w).max((-2, -1), keepdims=True).astype(jnp.float32), _OPERAND)
    # Optimizers convert weights of bfloat16 to float32. If this did too, XLA for GPUs would share
    # one copy, transposed as cuBLAS reads operands, and transpose what the optimizer adds to it.
    exact = jnp.promote_types(w.dtype, jnp.bfloat16)
    return QuantizedOperand((w.astype(exact) / scale.astype(exact)).astype(_OPERAND), scale)

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    return multiply(form, x, w, w8, None)

  def finished(self, y: jax.Array) -> jax.Array:
    return without_gelu(y)


@jax.custom_vjp
def without_gelu(y: jax.Array) -> jax.Array:
  """Returns y, a product to which its bias was added, and keeps cuBLAS from computing its GELU.

  XLA would ask cuBLAS for GELU's input and its output; in FP8, cuBLAS can write only one.
  """
  return jax.lax.optimization_barrier(y)


without_gelu.defvjp(lambda y: (without_gelu(y), None), lambda _, dy: (dy,))


class AmaxHistory(NamedTuple):
  """The amax of recent steps, newest first, float32; the "gradient" holds this step's amax."""

  inputs: jax.Array
  gradients: jax.Array


@jax.custom_vjp
def multiply(
  form: MatmulForm,
  x: jax.Array,
  w: jax.Array,
  w8: QuantizedOperand | None,
  history: AmaxHistory | None,
) -> jax.Array:
  """Returns the product, in the dtype of x. `w8` is `Fp8.quantized(w)`; None: it is computed here.

  Without a history, scaling is current. With one, it is delayed for x and for dy, the cotangent of
  the product; entry 0 of the history's cotangents is then their amax in this step.
  """
  return _forward(form, x, w, w8, history)[0]


def _forward(form, x, w, w8, history):
  w8 = Fp8.quantized(w) if w8 is None else w8
  amax_x = _amax(x)
  x8 = quantized_per_tensor(x, _OPERAND, amax_x, None if history is None else history.inputs)
  y = form.outputs(x8.values, w8.values, _wide(x))
  y = _scaled(y, x8.scale * form.broadcast_scale(w8.scale, y), x.dtype)
  delayed = None if history is None else (history, amax_x)
  return y, (form, x8, w8, delayed, jnp.zeros((), w.dtype))


def _backward(saved, dy):
  form, x8, w8, delayed, like_w = saved
  on_one_gpu = topology.is_gpu() and not mesh.sizes_here(mesh.AXES)
  amax_dy = _amax_by_columns(dy) if on_one_gpu else _amax(dy)
  earlier = None if delayed is None else delayed[0].gradients
  dy8 = quantized_per_tensor(dy, _GRADIENT, amax_dy, earlier)
  dx = form.to_inputs(dy8.values, w8.values, _wide(dy))
  dx = _scaled(dx, dy8.scale * form.broadcast_scale(w8.scale, dy), dy.dtype)
  dw = form.to_weights(x8.values, dy8.values, _wide(like_w))
  dw = _scaled(dw, x8.scale * dy8.scale, like_w.dtype)
  if delayed is None:
    return None, dx, dw, None, None
  history, amax_x = delayed
  newest = (amax_x, amax_dy)
  found = (jnp.zeros_like(old).at[0].set(new) for old, new in zip(history, newest, strict=True))
  return None, dx, dw, None, AmaxHistory(*found)


multiply.defvjp(_forward, _backward)


def quantized_per_tensor(
  x: jax.Array, dtype: Any, amax: jax.Array, history: jax.Array | None = None
) -> QuantizedOperand:
  """Returns x quantized to an 8-bit dtype with a scalar scale.

  The scale comes from an amax history if there is one, else from `amax`, that of x.
  """
  if history is None:
    scale = _scale(amax, dtype)
    return QuantizedOperand((x.astype(jnp.float32) / scale).astype(dtype), scale)
  scale = jnp.where(history.max() > 0, _scale(history.max(), dtype), 1)
  top = float(jnp.finfo(dtype).max)
  return QuantizedOperand(jnp.clip(x.astype(jnp.float32) / scale, -top, top).astype(dtype), scale)


def _amax(x: jax.Array) -> jax.Array:
  return jnp.abs(x).max().astype(jnp.float32)


def _amax_by_columns(dy: jax.Array) -> jax.Array:
  """Returns the amax of dy [..., M, N] or [B, T, N, H], tokens first.

  On a GPU, the kernel that sums dy over tokens, for the gradient of a bias or of the scale of a
  norm, then finds them too.
  """
  columns = jnp.abs(dy).max(tuple(range(min(dy.ndim - 1, 2))))
  return _amax(jax.lax.optimization_barrier(columns))


def _scale(largest: jax.Array, dtype: Any) -> jax.Array:
  _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
  return jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, -126))  # The least normal number.


def _wide(x: jax.Array) -> Any:
  # Unscaled sums overflow float16.
  return jnp.float32 if x.dtype == jnp.float16 else x.dtype


def _scaled(y: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
  # XLA passes a scale of this form, a scalar power of two, to cuBLAS.
  scale = scale.reshape(()) if scale.size == 1 else scale
  return (y * scale.astype(y.dtype)).astype(dtype)
