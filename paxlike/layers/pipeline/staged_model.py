# SPDX-License-Identifier: Apache-2.0
"""The interface of a model that the executor of pipelines runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from paxlike.layers.aux_losses import Aux


class StageArrays(NamedTuple):
  """Arrays of a model, by their sharding over stages.

  Attributes:
    common: A pytree replicated on all stages.
    stacked: A pytree of [layers, ...], sharded over stages; a stage's chunks are adjacent.
  """

  common: Any
  stacked: Any


class StagedModel(Protocol):
  """The model that the executor runs. Constants get no gradient."""

  def embed(self, weights: Any, constants: Any, microbatch: Any) -> tuple[jax.Array, Aux]:
    """Returns (x, Aux): the input of the first virtual stage, [b, T, D], and what its layers add.

    This is the embedding and all layers before the stacked ones. Its weights are the common ones.
    """
    ...

  def chunk(
    self,
    weights: StageArrays,
    constants: StageArrays,
    x: jax.Array,
    microbatch: Any,
    place: jax.Array,
  ) -> tuple[jax.Array, Aux]:
    """Returns (x after the layers of virtual stage `place`, their Aux).

    The stacked weights and constants are those of the chunk.
    """
    ...

  def further(
    self, weights: Any, constants: Any, x: jax.Array, microbatch: Any
  ) -> tuple[list[jax.Array], Aux]:
    """Returns (further states that have a loss, [b, T, D] each, the Aux of their layers).

    x is the final activations. The list is empty if only these have a loss.
    """
    ...

  def loss(
    self,
    weights: Any,
    constants: Any,
    states: Sequence[jax.Array],
    microbatch: Any,
    shard: Callable[[jax.Array], jax.Array],
  ) -> tuple[jax.Array, Aux]:
    """Returns (the loss of this stage's shard of a microbatch's tokens, further losses).

    Args:
      weights: The common weights.
      constants: The common constants.
      states: [b, T / S, D] each: the final activations of the shard, then those of `further`.
      microbatch: All tokens, [b, T, ...].
      shard: Returns the shard [b, T / S, ...] of an array [b, T, ...].
    """
    ...

  def combine(self, total: Any, new: Any) -> Any:
    """Returns float32 gradients of common, or of stacked, weights after adding `new` ones."""
    ...

  def aux_cotangent(self, aux: Aux) -> Aux:
    """Returns the cotangent of an Aux."""
    ...
