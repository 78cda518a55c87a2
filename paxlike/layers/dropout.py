# SPDX-License-Identifier: Apache-2.0
"""Dropout (Srivastava et al., 2014)."""

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.call_context import Context
from paxlike.layers.module import Module


@configurable
class Dropout(Module):
  """Zeroes elements with probability `rate` and scales the rest; the identity without a key."""

  def __init__(self, *, rate: ranges.Probability):
    self.rate = rate

  def __call__(self, x: jax.Array, context: Context) -> jax.Array:
    if context.dropout is None or self.rate == 0:
      return x
    keep = jax.random.bernoulli(context.dropout, 1 - self.rate, x.shape)
    return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)
