# SPDX-License-Identifier: Apache-2.0
"""One layer of a transformer."""

from collections.abc import Callable
from typing import Any

import jax

from paxlike import mesh
from paxlike.layers.attention import Attention
from paxlike.layers.context import Context
from paxlike.layers.dropout import Dropout
from paxlike.layers.mlp import Mlp
from paxlike.layers.module import Module

# Sums over layers of what a layer reports besides its output, such as an auxiliary loss.
Aux = dict[str, jax.Array]


class Block(Module):
  """Attention and feed-forward, each after a norm and around a residual connection (pre-LN)."""

  def __init__(
    self,
    dim: int,
    *,
    norm: Callable[[int], Any],
    attention: Callable[[int], Attention],
    mlp: Callable[[int], Mlp],
    dropout: Callable[[], Dropout] | None = None,
  ):
    self.attention_norm = norm(dim)
    self.attention = attention(dim)
    self.mlp_norm = norm(dim)
    self.mlp = mlp(dim)
    self.dropout = None if dropout is None else dropout()

  def __call__(self, x_BTD: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
    y_BTD = self.attention(self.attention_norm(x_BTD), context)
    x_BTD = self._add(x_BTD, y_BTD, context.fold(0))
    y_BTD = self.mlp(self.mlp_norm(x_BTD))
    return self._add(x_BTD, y_BTD, context.fold(1)), {}

  def _add(self, x_BTD: jax.Array, y_BTD: jax.Array, context: Context) -> jax.Array:
    if self.dropout is not None:
      y_BTD = self.dropout(y_BTD, context)
    return mesh.constrain(x_BTD + y_BTD, "batch", "time", None)
