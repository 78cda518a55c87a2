# SPDX-License-Identifier: Apache-2.0
"""Normalization over the last dim, with statistics in float32."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import topology
from paxlike.layers import module


@configurable
class LayerNorm(module.Module):
  """Layer normalization (Ba et al., 2016) over a dim named `over`.

  The scale is the stored weight plus `offset`; with offset 1, weight decay pulls it towards 1.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    over: str = "model",
    epsilon: ranges.Epsilon = 1e-5,
    offset: ranges.Finite = 0.0,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    self.epsilon = epsilon
    self.offset = offset
    self.dtype = dtype
    self.scale = self.weight({over: dim}, init=_one_minus(offset))
    self.bias = self.weight({over: dim}, init=module.zeros)

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., dim], normalized, scaled and shifted, in `dtype`."""
    layer_norm: Any = _layer_norm_on_gpu if topology.is_gpu() else _layer_norm
    y = layer_norm(self.epsilon, x, self.offset + self.scale[...], self.bias[...])
    return y.astype(self.dtype)


@configurable
class RmsNorm(module.Module):
  """Root mean square normalization (Zhang and Sennrich, 2019); see `LayerNorm`."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    over: str = "model",
    epsilon: ranges.Epsilon = 1e-6,
    offset: ranges.Finite = 0.0,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    self.epsilon = epsilon
    self.offset = offset
    self.dtype = dtype
    self.scale = self.weight({over: dim}, init=_one_minus(offset))

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., dim] divided by its root mean square, scaled, in `dtype`."""
    y = _over_rms(x.astype(jnp.float32), self.epsilon)
    return (y * (self.offset + self.scale[...])).astype(self.dtype)


@configurable
class GroupedRmsNorm(module.Module):
  """`RmsNorm` of groups of heads; one group is all heads of a token (OLMo 2's queries and keys)."""

  def __init__(
    self,
    heads: Mapping[str, int],
    num_groups: ranges.Size = 1,
    *,
    epsilon: ranges.Epsilon = 1e-6,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    """`heads` has the names and sizes of the dims N and H; `num_groups` divides N."""
    self.num_groups = num_groups
    self.epsilon = epsilon
    self.dtype = dtype
    self.scale = self.weight(heads, init=module.ones)

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., N, H], each group divided by its root mean square, scaled, in `dtype`."""
    *leading, N, H = x.shape
    y = x.astype(jnp.float32).reshape(*leading, self.num_groups, N // self.num_groups, H)
    y = _over_rms(y, self.epsilon, (-2, -1)).reshape(x.shape)
    return (y * self.scale[...]).astype(self.dtype)


@configurable
class UnscaledRmsNorm(module.Module):
  """`RmsNorm` without a weight."""

  def __init__(self, dim: ranges.Size, *, over: str = "model", epsilon: ranges.Epsilon = 1e-6):
    """`dim` and `over`, which callers pass to every norm, are not used."""
    del dim, over
    self.epsilon = epsilon

  @jax.named_scope("norm")
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., dim] divided by its root mean square, in its dtype."""
    return _over_rms(x.astype(jnp.float32), self.epsilon).astype(x.dtype)


def _layer_norm(epsilon: float, x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
  """Returns x [..., D], normalized, times scale [D] plus bias [D], in float32."""
  return _layer_norm_forward(epsilon, x, scale, bias)[0]


def _layer_norm_forward(epsilon, x, scale, bias):
  wide = x.astype(jnp.float32)
  mean = wide.mean(-1, keepdims=True)
  variance = jnp.square(wide - mean).mean(-1, keepdims=True)
  inverse = jax.lax.rsqrt(variance + epsilon)
  return (wide - mean) * inverse * scale + bias, (x, scale, bias, mean, inverse)


def _layer_norm_backward(epsilon, saved, dy):
  del epsilon
  x, scale, bias, mean, inverse = saved
  # XLA for GPUs would compute the mean again, in a kernel that cannot sum over tokens. That kernel
  # would write the summands of the gradient of the scale, in float32.
  mean, inverse = jax.lax.optimization_barrier((mean, inverse))
  normalized = (x.astype(jnp.float32) - mean) * inverse
  scaled = dy * scale
  dx = scaled - scaled.mean(-1, keepdims=True)
  dx = (dx - normalized * (scaled * normalized).mean(-1, keepdims=True)) * inverse
  tokens = tuple(range(dy.ndim - 1))
  d_scale, d_bias = (dy * normalized).sum(tokens), dy.sum(tokens)
  return dx.astype(x.dtype), d_scale.astype(scale.dtype), d_bias.astype(bias.dtype)


_layer_norm_on_gpu = jax.custom_vjp(_layer_norm, nondiff_argnums=(0,))
_layer_norm_on_gpu.defvjp(_layer_norm_forward, _layer_norm_backward)


def _over_rms(x: jax.Array, epsilon: float, dims: int | tuple[int, ...] = -1) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.square(x).mean(dims, keepdims=True) + epsilon)


def _one_minus(offset: float) -> module.Initializer:
  return functools.partial(module.constant, value=1.0 - offset)
