# SPDX-License-Identifier: Apache-2.0
"""The feed-forward layer of a block."""

from collections.abc import Callable

import jax

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers.activations import Activation, activate, gelu
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.module import Module


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
      return self.down(activate(self.activation, y_BTF), context), none()
    gate_BTF = mesh.constrain(self.gate(x_BTD, context), "batch", "time", "ffn")
    return self.down(activate(self.activation, gate_BTF, y_BTF), context), none()
