# SPDX-License-Identifier: Apache-2.0
"""FP8 matmuls with delayed scaling: a layer, since it keeps statistics from step to step."""

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.layers.module import Module
from paxlike.layers.precision.fp8 import AmaxHistory, Fp8, multiply, without_gelu
from paxlike.layers.precision.matmul import MatmulForm
from paxlike.layers.precision.rounding import QuantizedOperand


@configurable
class DelayedFp8(Module):
  """A `Dot` with delayed scaling: scales of activations and gradients come from amax histories.

  The kernel that produces an operand can then quantize it too, whereas `Fp8` needs the amax of the
  whole array first. Values beyond the format's range saturate; the range ends at one to two times
  the largest amax in the history. In the first step, the history holds zeros and scales are 1.
  Weights have current scaling.
  """

  def __init__(self, history: int = 16):
    """`history` is the length of the amax histories, in steps."""
    self.inputs = self.statistic({"history": history}, update=_pushed)
    self.gradients = self.statistic({"history": history}, update=_pushed)

  @property
  def operands(self) -> str:
    return "fp8"

  def quantized(self, w: jax.Array) -> QuantizedOperand:
    return Fp8.quantized(w)

  def __call__(
    self, form: MatmulForm, x: jax.Array, w: jax.Array, w8: QuantizedOperand | None = None
  ) -> jax.Array:
    return multiply(form, x, w, w8, AmaxHistory(self.inputs[...], self.gradients[...]))

  def finished(self, y: jax.Array) -> jax.Array:
    return without_gelu(y)


def _pushed(history: jax.Array, newest: jax.Array) -> jax.Array:
  """Returns the history, newest first, with this step's amax prepended and the oldest dropped.

  `newest` is the cotangent of the history from `multiply`; its entry 0 is this step's amax.
  """
  return jnp.concatenate([newest[..., :1], history[..., :-1]], -1)
