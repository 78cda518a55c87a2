# SPDX-License-Identifier: Apache-2.0
"""Per-layer embeddings (Gemma 3n, 2025): a small vector for each token and layer.

It depends on the token alone, and enters each layer after its feed-forward layer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers import module
from paxlike.layers.activations import Activation, activate, gelu
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.precision import float32_sums


@configurable
class PerLayerEmbedding(module.Module):
  """The inputs of all layers: an embedding of the token, and a projection of what x_BTD holds."""

  def __init__(
    self,
    vocab_size: ranges.Size,
    dim: ranges.Size,
    num_layers: ranges.Size,
    *,
    width: ranges.Size,
    init: module.Initializer,
    projection: Callable[..., Linear],
    norm: Callable[..., Any],
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    """Builds the layer.

    Args:
      vocab_size: V.
      dim: D.
      num_layers: L.
      width: P, the width of the input of one layer.
      init: Initializer of the embeddings.
      projection: D -> L x P.
      norm: Applied to the projection for each layer.
      dtype: The compute dtype.
    """
    self.width = width
    self.num_layers = num_layers
    self.dtype = dtype
    outputs = {"layer_inputs": num_layers * width}
    self.table = self.weight(
      {"vocab": vocab_size, **outputs}, init=init, fan_in=tuple(outputs), compute_dtype=dtype
    )
    self.projection = projection({"model": dim}, outputs)
    self.norm = norm(width, over="layer_input")

  @jax.named_scope("per_layer_embedding")
  def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns [L, B, T, P] for int32 tokens and their embeddings."""

    def by_layer(x: jax.Array) -> jax.Array:
      x = mesh.constrain(x, "batch", "time", None)
      return x.reshape(*x.shape[:-1], self.num_layers, self.width)

    table = self.table[...].astype(self.dtype)
    tokens: Any = float32_sums.lookup(table, tokens_BT, ("vocab", "layer_inputs"))
    projected = self.projection(x_BTD, context) * jnp.asarray(x_BTD.shape[-1] ** -0.5, self.dtype)
    sum_BTLP = by_layer(tokens) * jnp.asarray(math.sqrt(self.width), self.dtype)
    sum_BTLP += self.norm(by_layer(projected))
    return jnp.moveaxis(sum_BTLP * jnp.asarray(0.5**0.5, self.dtype), 2, 0)


@configurable
class PerLayerInput(module.Module):
  """norm(output(activation(gate(x)) * input)), with the layer's own input of width P."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    width: ranges.Size,
    gate: Callable[..., Linear],
    output: Callable[..., Linear],
    norm: Callable[[int], Any],
    activation: Activation = gelu,
  ):
    """`gate` is D -> P, `output` is P -> D."""
    self.gate = gate({"model": dim}, {"layer_input": width})
    self.output = output({"layer_input": width}, {"model": dim})
    self.norm = norm(dim)
    self.activation = activation

  def __call__(self, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns what the layer adds to x_BTD."""
    assert context.layer_inputs is not None
    gate_BTP = activate(self.activation, self.gate(x_BTD, context))
    return self.norm(self.output(gate_BTP * context.layer_inputs, context))
