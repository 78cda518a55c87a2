# SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxlike import mesh, ranges
from paxlike.configurable import configurable
from paxlike.layers.context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.module import Module

# Of `up` alone, or of (gate, up).
Activation = Callable[..., jax.Array]


@configurable
@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
  """GELU by tanh (Hendrycks and Gimpel, 2016).

  Its gradient keeps x alone, apart from the forward pass: only then can cuBLAS, which has GELU as
  the end of a product, also write x.
  """
  return jax.nn.gelu(x)


def _gelu_forward(x):
  return jax.nn.gelu(x), x


def _gelu_backward(x, cotangent):
  return jax.vjp(jax.nn.gelu, jax.lax.optimization_barrier(x))[1](cotangent)


gelu.defvjp(_gelu_forward, _gelu_backward)


@configurable
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """SiLU of the gate times up (Shazeer, 2020)."""
  return jax.nn.silu(gate) * up


@configurable
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """GELU (tanh) of the gate times up (Shazeer, 2020)."""
  return jax.nn.gelu(gate) * up


@configurable
def clamped_swiglu(
  gate: jax.Array, up: jax.Array, *, alpha: ranges.Finite = 1.702, limit: ranges.PositiveFloat = 7.0
) -> jax.Array:
  """The activation of gpt-oss: both clamped, `up` shifted by 1."""
  gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
  return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@configurable
class Mlp(Module):
  """Two linear maps around an activation, of (gate, up) if there is a `gate`."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    hidden_dim: ranges.Size,
    up: Callable[..., Linear],
    down: Callable[..., Linear],
    gate: Callable[..., Linear] | None = None,
    activation: Activation = gelu,
  ):
    self.activation = activation
    self.up = up({"model": dim}, {"ffn": hidden_dim})
    self.gate = None if gate is None else gate({"model": dim}, {"ffn": hidden_dim})
    self.down = down({"ffn": hidden_dim}, {"model": dim})

  def __call__(
    self, x_BTD: jax.Array, context: Context | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns (y_BTD, nothing to report)."""
    y_BTF = mesh.constrain(self.up(x_BTD, context), "batch", "time", "ffn")
    if self.gate is None:
      return self.down(self.activation(y_BTF), context), {}
    gate_BTF = mesh.constrain(self.gate(x_BTD, context), "batch", "time", "ffn")
    return self.down(self.activation(gate_BTF, y_BTF), context), {}
