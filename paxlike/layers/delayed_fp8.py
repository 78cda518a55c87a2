# SPDX-License-Identifier: Apache-2.0
"""FP8 matmuls that keep statistics from step to step."""

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.layers.module import Module
from paxlike.layers.precision.fp8 import AmaxHistory, Fp8, multiply
from paxlike.layers.precision.matmul import Product
from paxlike.layers.precision.rounding import Rounded


@configurable
class DelayedFp8(Module):
  """A `Dot` with delayed scaling: scales of activations and gradients come from amax histories.

  The kernel that produces an operand can then quantize it too, whereas `Fp8` needs the amax of the
  whole array first. Values above the amax of the history saturate. In the first step, the history
  is empty and scales are 1.
  """

  def __init__(self, history: int = 16):
    """`history` is the length of the amax histories, in steps."""
    self.inputs = self.statistic({"history": history}, update=_append)
    self.gradients = self.statistic({"history": history}, update=_append)

  def quantized(self, w: jax.Array) -> Rounded:
    return Fp8.quantized(w)

  def __call__(
    self, product: Product, x: jax.Array, w: jax.Array, w8: Rounded | None = None
  ) -> jax.Array:
    return multiply(product, x, w, w8, AmaxHistory(self.inputs[...], self.gradients[...]))


def _append(history: jax.Array, newest: jax.Array) -> jax.Array:
  return jnp.concatenate([newest[..., :1], history[..., :-1]], -1)
