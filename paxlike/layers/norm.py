# SPDX-License-Identifier: Apache-2.0
"""Normalization over the last dim, with statistics in float32."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
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
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    # Else XLA for GPUs computes the mean again in the backward pass, in a kernel that cannot sum
    # over tokens, and writes what is to be summed for the gradient of the scale in float32.
    mean, inverse = jax.lax.optimization_barrier((mean, jax.lax.rsqrt(variance + self.epsilon)))
    y = (x - mean) * inverse
    return (y * (self.offset + self.scale[...]) + self.bias[...]).astype(self.dtype)


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


def _over_rms(x: jax.Array, epsilon: float, dims: int | tuple[int, ...] = -1) -> jax.Array:
  return x * jax.lax.rsqrt(jnp.square(x).mean(dims, keepdims=True) + epsilon)


def _one_minus(offset: float) -> module.Initializer:
  return functools.partial(module.constant, value=1.0 - offset)
