# SPDX-License-Identifier: Apache-2.0
"""The arguments and results of a training step's gradient function."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch
from paxlike.layers.module import Params
from paxlike.layers.precision.rounding import QuantizedOperand


class Differentiated(NamedTuple):
  """Weights that a step differentiates, or their gradients; by name.

  Attributes:
    trained: The trained weights.
    extra: Non-trainable state, whose "gradient" is its new value.
  """

  trained: Params
  extra: Params


def combined(total: Differentiated, gradients: Differentiated) -> Differentiated:
  """Returns the sum of the gradients of microbatches; non-trainable state combines by maximum."""
  trained = jax.tree.map(jnp.add, total.trained, gradients.trained)
  return Differentiated(trained, jax.tree.map(jnp.maximum, total.extra, gradients.extra))


class Constants(NamedTuple):
  """Weights that a step does not differentiate, by name.

  Attributes:
    frozen: The frozen weights.
    reference: The weights of the reference model.
    operands: The quantized weights of low-precision matmuls.
  """

  frozen: Params
  reference: Params
  operands: dict[str, QuantizedOperand]


class Microbatch(NamedTuple):
  """A gradient-accumulation microbatch.

  Attributes:
    batch: Its sequences.
    index: Its index among the microbatches of the step.
    count: The number of microbatches.
    weight: The objective's weight of the whole batch, at least 1.
    dropout: The dropout key of the step.
  """

  batch: Batch
  index: int | jax.Array
  count: int
  weight: jax.Array
  dropout: jax.Array


# The Aux has the loss among its losses.
Gradients = Callable[[Differentiated, Constants, Microbatch], tuple[Differentiated, Aux]]
