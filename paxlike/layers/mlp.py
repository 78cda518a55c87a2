# SPDX-License-Identifier: Apache-2.0
"""The feed-forward layer of a block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.module import Module

# up -> hidden, or (gate, up) -> hidden.
Activation = Callable[..., jax.Array]


@configurable
@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
  """GELU, tanh approximation (Hendrycks and Gimpel, 2016).

  x is the only residual. XLA can then use cuBLAS's GELU epilogue, which also writes x.
  """
  return jax.nn.gelu(x)


def _gelu_forward(x):
  return jax.nn.gelu(x), x


def _gelu_backward(x, cotangent):
  return jax.vjp(jax.nn.gelu, jax.lax.optimization_barrier(x))[1](cotangent)


gelu.defvjp(_gelu_forward, _gelu_backward)


@configurable
def squared_relu(x: jax.Array) -> jax.Array:
  """relu(x)^2 (So et al., 2021, arXiv:2109.08668)."""
  return jnp.square(jax.nn.relu(x))


@configurable
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """silu(gate) * up (Shazeer, 2020)."""
  return jax.nn.silu(gate) * up


@configurable
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  """gelu(gate) * up, with the tanh approximation (Shazeer, 2020)."""
  return jax.nn.gelu(gate) * up


@configurable
def clamped_swiglu(
  gate: jax.Array, up: jax.Array, *, alpha: ranges.Finite = 1.702, limit: ranges.PositiveFloat = 7.0
) -> jax.Array:
  """The activation of gpt-oss: SwiGLU with `gate` and `up` clamped, and 1 added to `up`."""
  gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
  return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)


@configurable
class Mlp(Module):
  """down(activation(up(x))), or down(activation(gate(x), up(x))) if there is a `gate`."""

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

  def __call__(self, x_BTD: jax.Array, context: Context | None = None) -> tuple[jax.Array, Aux]:
    """Returns (y_BTD, an empty Aux)."""
    y_BTF = mesh.constrain(self.up(x_BTD, context), "batch", "time", "ffn")
    if self.gate is None:
      return self.down(self.activation(y_BTF), context), none()
    gate_BTF = mesh.constrain(self.gate(x_BTD, context), "batch", "time", "ffn")
    return self.down(self.activation(gate_BTF, y_BTF), context), none()
