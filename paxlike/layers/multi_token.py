# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: layers that predict tokens after the next one, only in training.

Layer k, from 1 on, predicts at position t of the inputs what next-token prediction predicts at
position t + k, which is token t + k + 1 if the inputs begin with token 0. It projects to logits
by the model's own output projection. Its loss is a sum over the positions whose document goes on
that far, and is divided by the same weight as the loss of next-token prediction.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers.aux_losses import Aux, add, none
from paxlike.layers.block import Block, by_token
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.module import Module
from paxlike.layers.remat import Remat

MtpKind = Literal["sequential", "parallel"]  # `SequentialMtp` or `ParallelMtp`.
ROLE = "mtp_projection"  # Of the linear maps of `SequentialMtp`.

# (tokens_BT, context) -> x_BTD before the first layer.
Embed = Callable[[jax.Array, Context], jax.Array]
Batch = Mapping[str, jax.Array]  # As `decoder.Batch`.


class MultiTokenPrediction(Module):
  """The base class.

  Attributes:
    layers: Layer 1 and those after it.
    loss_weight: Factor of the loss, a mean over the layers.
    remat: Applied to each layer.
  """

  def __init__(self, layers: Sequence[Module], *, loss_weight: float, remat: Remat):
    self.layers = nnx.List(layers)
    self.loss_weight = loss_weight
    self.remat = remat

  @abc.abstractmethod
  def hidden(
    self, x_BTD: jax.Array, batch: Batch, context: Context, *, embed: Embed, norm: Any
  ) -> tuple[list[jax.Array], Aux]:
    """Returns (the hidden states of each layer for the output projection, the layers' Aux).

    Args:
      x_BTD: The output of the model's last block.
      batch: See `decoder.Batch`.
      context: The context of all layers.
      embed: Embeds tokens as the model does.
      norm: The model's last norm.
    """

  def losses(
    self,
    states: Sequence[jax.Array],
    batch: Batch,
    token_loss: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    shard: Callable[[jax.Array], jax.Array] = lambda x: x,
  ) -> Aux:
    """Returns the weighted loss, and the metric `mtp_loss`: its mean over all predicted tokens.

    Args:
      states: From `hidden`.
      batch: See `decoder.Batch`.
      token_loss: (x_BTD, targets_BT, weights_BT) -> the weighted sum of cross-entropies.
      shard: Returns the tokens that `states` has of an array [B, T].
    """
    total, weight = jnp.zeros(()), jnp.zeros(())
    for depth, x_BTD in enumerate(states, 1):
      targets_BT, weights_BT = (shard(x) for x in targets_after(batch, depth))
      total += token_loss(x_BTD, targets_BT, weights_BT)
      weight += weights_BT.sum()
    loss = self.loss_weight / len(states) * total
    metric = jnp.stack([total, weight])
    return none()._replace(summed={"mtp_loss": loss}, metrics={"mtp_loss": metric})

  def _run(self, layer: Any, *arrays: jax.Array, context: Context) -> Any:
    context = dataclasses.replace(context, recomputes=self.remat is Remat.SAVE_NOTHING)
    if self.remat is not Remat.SAVE_EVERYTHING:
      layer = jax.checkpoint(layer, policy=self.remat.policy)
    return layer(*arrays, context)


def targets_after(batch: Batch, depth: int) -> tuple[jax.Array, jax.Array]:
  """Returns (targets_BT, weights_BT) of layer `depth`.

  The weight is 0 where the sequence, or the document in it, ends before.
  """
  weights_BT = _ahead(batch["weights"], depth)
  if (segments_BT := batch.get("segments")) is not None:
    weights_BT = weights_BT * (segments_BT == _ahead(segments_BT, depth))
  return _ahead(batch["targets"], depth), weights_BT


def _ahead(x_BT: jax.Array, distance: int) -> jax.Array:
  """Returns x_BT at later positions; zeros after the end."""
  distance = min(distance, x_BT.shape[1])
  x_BT = jnp.pad(x_BT[:, distance:], ((0, 0), (0, distance)))
  return mesh.constrain(x_BT, "batch", "time")


@configurable
class SequentialMtp(MultiTokenPrediction):
  """The modules of DeepSeek-V3 (DeepSeek-AI, 2024, arXiv:2412.19437, section 2.2).

  Layer k takes the normalized output of the layer before, at first that of the model, and the
  embedding of the k-th token after it. In the last k positions of a document it reads tokens of the
  next one; these positions have no weight, and no earlier position attends to them.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_layers: ranges.Depth,
    norm: Callable[[int], Any],
    projection: Callable[..., Linear],
    block: Callable[[int], Block],
    loss_weight: ranges.Weight = 0.1,
    remat: Remat = Remat.SAVE_EVERYTHING,
  ):
    layers = [_Combining(dim, norm, projection, block) for _ in range(num_layers)]
    super().__init__(layers, loss_weight=loss_weight, remat=remat)

  def hidden(
    self, x_BTD: jax.Array, batch: Batch, context: Context, *, embed: Embed, norm: Any
  ) -> tuple[list[jax.Array], Aux]:
    inputs_BT = batch["inputs"]
    positions_BT = context.positions_BT
    if positions_BT is None:
      positions_BT = jnp.broadcast_to(jnp.arange(inputs_BT.shape[1]), inputs_BT.shape)
    x_BTD, states, aux = by_token(norm, x_BTD), [], none()
    for depth, layer in enumerate(self.layers, 1):
      own = context.fold(depth)
      later = dataclasses.replace(own, positions_BT=_ahead(positions_BT, depth))
      embedded_BTD = embed(_ahead(inputs_BT, depth), later)
      x_BTD, new = self._run(layer, x_BTD, embedded_BTD, context=own.fold(1))
      states.append(x_BTD)
      aux = add(aux, new)
    return states, aux


class _Combining(Module):
  """A layer of `SequentialMtp`."""

  def __init__(
    self,
    dim: int,
    norm: Callable[[int], Any],
    projection: Callable[..., Linear],
    block: Callable[[int], Block],
  ):
    self.hidden_norm = norm(dim)
    self.embedding_norm = norm(dim)
    self.projection = projection({"concat": 2 * dim}, {"model": dim})
    self.block = block(dim)
    self.norm = norm(dim)

  def __call__(
    self, x_BTD: jax.Array, embedded_BTD: jax.Array, context: Context
  ) -> tuple[jax.Array, Aux]:
    """Returns (x_BTD for the output projection and for the next layer, the block's Aux)."""
    normed = (by_token(self.embedding_norm, embedded_BTD), by_token(self.hidden_norm, x_BTD))
    x_BTD = self.projection(jnp.concatenate(normed, axis=-1), context)
    x_BTD = mesh.constrain(x_BTD, "batch", "time", None)
    x_BTD, _, aux = self.block(x_BTD, context)
    return by_token(self.norm, x_BTD), aux


@configurable
class ParallelMtp(MultiTokenPrediction):
  """Independent blocks on the output of the model's last block (Gloeckle et al., 2024).

  The model's last norm and output projection serve all of them (arXiv:2404.19737). In the paper the
  next token has a block of its own, too; here the model's last layer serves it.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_layers: ranges.Depth,
    block: Callable[[int], Block],
    loss_weight: ranges.Weight = 0.1,
    remat: Remat = Remat.SAVE_EVERYTHING,
  ):
    layers = [block(dim) for _ in range(num_layers)]
    super().__init__(layers, loss_weight=loss_weight, remat=remat)

  def hidden(
    self, x_BTD: jax.Array, batch: Batch, context: Context, *, embed: Embed, norm: Any
  ) -> tuple[list[jax.Array], Aux]:
    del batch, embed
    states, aux = [], none()
    for depth, block in enumerate(self.layers, 1):
      y_BTD, _, new = self._run(block, x_BTD, context=context.fold(depth))
      states.append(by_token(norm, y_BTD))
      aux = add(aux, new)
    return states, aux
