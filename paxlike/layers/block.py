# SPDX-License-Identifier: Apache-2.0
"""One layer of a model: a mixer of tokens, and a feed-forward layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import gradient_order, module
from paxlike.layers.aux_losses import Aux, add, none
from paxlike.layers.call_context import Context
from paxlike.layers.dropout import Dropout
from paxlike.layers.linear import flatten_tokens
from paxlike.layers.mlp import Mlp
from paxlike.layers.moe.moe import Moe
from paxlike.layers.per_layer_input import PerLayerInput


@configurable
class Block(module.Module):
  """Attention and feed-forward, each with a residual connection, and norms before or after.

  A layer with a recurrent state may take the place of attention.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    norm: Callable[[int], Any] | None,
    attention: Callable[[int], Any] | None,
    mlp: Callable[[int], Mlp | Moe] | None,
    post_norm: Callable[[int], Any] | None = None,
    dropout: Callable[[], Dropout] | None = None,
    residual_scale: ranges.Finite = 1.0,
    per_layer_input: Callable[[int], PerLayerInput] | None = None,
    output_scale: module.Initializer | None = None,
    time: str = "time",
  ):
    """`norm` applies to the inputs of attention and feed-forward (pre-LN); None: no norm.

    Either `attention` or `mlp` may be None: the block then consists of the other one.

    `post_norm` and `dropout` apply to the outputs of attention and feed-forward.

    `residual_scale` multiplies them before they are added to the residual stream.

    `per_layer_input` is a third branch, after feed-forward.

    `output_scale` initializes a factor of the block's output, which no step changes (Gemma 4).

    `time` is the dim name of T outside attention and feed-forward. With "sequence", T is sharded
    over the tensor axis too, and so are norms and their residuals (sequence parallelism;
    Korthikanti et al., 2022, arXiv:2205.05198).
    """
    self.time = time
    if attention is None and mlp is None:
      raise ArgumentError("attention=None and mlp=None of a Block: give at least one.")

    def norm_of(part: Any, make: Callable[[int], Any] | None) -> Any:
      return None if part is None or make is None else make(dim)

    self.attention_norm = norm_of(attention, norm)
    self.attention = None if attention is None else attention(dim)
    self.attention_post_norm = norm_of(attention, post_norm)
    self.mlp = None if mlp is None else mlp(dim)
    has_own_norms = getattr(self.mlp, "has_own_norms", False)
    self.mlp_norm = None if has_own_norms else norm_of(mlp, norm)
    self.mlp_post_norm = norm_of(mlp, post_norm)
    self.per_layer_input = None if per_layer_input is None else per_layer_input(dim)
    self.dropout = None if dropout is None else dropout()
    self.residual_scale = residual_scale
    self.output_scale = (
      None
      if output_scale is None
      else self.weight({"scale": 1}, init=output_scale, update=module.kept)
    )

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: Any = None
  ) -> tuple[jax.Array, Any, Aux]:
    """Returns (x_BTD, the updated cache, the layers' Aux)."""
    combined, logged = none(), {}
    attention, mlp = self.attention, self.mlp
    if attention is not None:
      with jax.named_scope("attention"):
        y_BTD = self._normed(self.attention_norm, x_BTD)
        if context.recomputes:
          y_BTD, (attention, mlp) = gradient_order.after_weights(y_BTD, (attention, mlp))
        y_BTD, cache, aux = attention(y_BTD, context, cache)
        if self.attention_post_norm is not None:
          y_BTD = by_token(self.attention_post_norm, y_BTD, time=self.time)
        logged |= _logged("attention_rms", y_BTD, context)
        x_BTD = self._add(x_BTD, y_BTD, context.fold(0))
        combined = add(combined, aux)
    if mlp is not None:
      with jax.named_scope("mlp"):
        y_BTD, aux = mlp(self._normed(self.mlp_norm, x_BTD), context)
        if self.mlp_post_norm is not None:
          y_BTD = by_token(self.mlp_post_norm, y_BTD, time=self.time)
        logged |= _logged("mlp_rms", y_BTD, context)
        x_BTD = self._add(x_BTD, y_BTD, context.fold(1))
        combined = add(combined, aux)
    if self.per_layer_input is not None:
      with jax.named_scope("per_layer_input"):
        y_BTD = self.per_layer_input(self._normed(None, x_BTD), context)
        x_BTD = self._add(x_BTD, y_BTD, context.fold(2))
    if self.output_scale is not None:
      x_BTD = x_BTD * self.output_scale[...].astype(x_BTD.dtype)
    logged |= _logged("residual_rms", x_BTD, context)
    return x_BTD, cache, combined._replace(layer_sums=combined.layer_sums | logged)

  @property
  def reads_earlier_layers(self) -> bool:
    """Whether it reads arrays of the layers before it, or of the embedding, besides x_BTD."""
    return self.per_layer_input is not None or getattr(self.attention, "key", self) is None

  def _add(self, x_BTD: jax.Array, y_BTD: jax.Array, context: Context) -> jax.Array:
    if self.dropout is not None:
      y_BTD = self.dropout(y_BTD, context)
    if self.residual_scale != 1:
      y_BTD = y_BTD * jnp.asarray(self.residual_scale, y_BTD.dtype)
    return mesh.constrain(by_token(jnp.add, x_BTD, y_BTD, time=self.time), "batch", self.time, None)

  def _normed(self, norm: Any, x_BTD: jax.Array) -> jax.Array:
    y_BTD = x_BTD if norm is None else by_token(norm, x_BTD, time=self.time)
    if self.time == "time":
      return y_BTD
    # Else XLA may gather the float32 that the norm computes with.
    y_BTD = mesh.constrain(y_BTD, "batch", self.time, None)
    return mesh.constrain(y_BTD, "batch", "time", None)


def _logged(name: str, x_BTD: jax.Array, context: Context) -> dict[str, jax.Array]:
  """Returns the [sum of squares, count] of a layer metric, if `context.log_layers`."""
  if not context.log_layers:
    return {}
  squares = jnp.square(jax.lax.stop_gradient(x_BTD).astype(jnp.float32)).sum()
  return {name: jnp.stack([squares, jnp.float32(x_BTD.size)])}


def by_token(
  function: Callable[..., jax.Array], *arrays_BTD: jax.Array, time: str = "time"
) -> jax.Array:
  """Returns function(*arrays), [B, T, D], computed with tokens flattened by `flatten_tokens`.

  With three dims, XLA for GPUs changes the memory layout from layer to layer; with two, XLA for
  TPUs copies what attention returns.
  """
  outputs = function(*(flatten_tokens(x, time) for x in arrays_BTD))
  return outputs.reshape(arrays_BTD[0].shape)
