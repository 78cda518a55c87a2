# SPDX-License-Identifier: Apache-2.0
"""The interface of training objectives, and the reference model that some of them need."""

import abc
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from paxlike.layers import lora
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import VALUE_HEAD, Batch, Decoder
from paxlike.layers.module import Definition, Params

_ADDED = re.compile(rf"{lora.WEIGHTS}(b|magnitude)$")


class Objective(abc.ABC):
  """A loss over a batch.

  Attributes:
    needs_reference: Whether it needs a frozen reference model: the initial model or, with LoRA, the
      base model; or a teacher.
  """

  needs_reference = False

  def reference(self, definition: Definition) -> Definition | None:
    """Returns the definition of the reference model, of whose weights a step needs a copy.

    None: it needs none, or the model's own weights serve, as with LoRA.
    """
    return definition if self.needs_reference and not shares_base(definition) else None

  @abc.abstractmethod
  def weight(self, batch: Batch) -> jax.Array:
    """Returns the divisor of the summed loss of a whole batch, a float32 scalar."""

  @abc.abstractmethod
  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    """Returns (summed loss, the Aux of layers and objective) of a microbatch."""


def shares_base(definition: Definition) -> bool:
  """Returns whether the base model can be the reference: only LoRA or a value head is trained."""
  trained = definition.optimized(definition.weights)
  return all(re.search(f"{lora.WEIGHTS}|{VALUE_HEAD}", name) for name in trained)


def without_adapters(params: Mapping[str, jax.Array]) -> Params:
  """Returns the weights with LoRA's b matrices and DoRA's magnitudes zeroed: the base model."""
  return {name: jnp.zeros_like(w) if _ADDED.search(name) else w for name, w in params.items()}
