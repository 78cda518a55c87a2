# SPDX-License-Identifier: Apache-2.0
"""Normalisation over the model dim, its statistics in float32."""

from typing import Any

import jax
import jax.numpy as jnp

from paxlike.layers import module


class LayerNorm(module.Module):
  """Layer normalisation (Ba et al., 2016); the scale is stored as its difference from 1."""

  def __init__(self, dim: int, *, epsilon: float = 1e-5, dtype: Any = jnp.float32):
    self.epsilon = epsilon
    self.dtype = dtype
    self.scale = self.weight({"model": dim}, init=module.zeros)
    self.bias = self.weight({"model": dim}, init=module.zeros)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., D], normalised, scaled and shifted, in `dtype`."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
    return (y * (1 + self.scale[...]) + self.bias[...]).astype(self.dtype)


class RmsNorm(module.Module):
  """Root mean square normalisation (Zhang and Sennrich, 2019); the scale is stored minus 1."""

  def __init__(self, dim: int, *, epsilon: float = 1e-6, dtype: Any = jnp.float32):
    self.epsilon = epsilon
    self.dtype = dtype
    self.scale = self.weight({"model": dim}, init=module.zeros)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns x [..., D] over its root mean square, scaled, in `dtype`."""
    x = x.astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
    return (y * (1 + self.scale[...])).astype(self.dtype)
