# SPDX-License-Identifier: Apache-2.0
"""The feed-forward part of a block."""

from collections.abc import Callable

import jax

from paxlike import mesh
from paxlike.layers.linear import Linear
from paxlike.layers.module import Module


class Mlp(Module):
  """Two linear maps around an activation, gated if `gate` is given (Shazeer, 2020)."""

  def __init__(
    self,
    dim: int,
    *,
    hidden_dim: int,
    up: Callable[..., Linear],
    down: Callable[..., Linear],
    gate: Callable[..., Linear] | None = None,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
  ):
    self.activation = activation
    self.up = up({"model": dim}, {"ffn": hidden_dim})
    self.gate = None if gate is None else gate({"model": dim}, {"ffn": hidden_dim})
    self.down = down({"ffn": hidden_dim}, {"model": dim})

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    y_BTF = mesh.constrain(self.up(x_BTD), "batch", "time", "ffn")
    if self.gate is None:
      return self.down(self.activation(y_BTF))
    return self.down(self.activation(self.gate(x_BTD)) * y_BTF)
