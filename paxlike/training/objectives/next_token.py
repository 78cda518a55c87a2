# SPDX-License-Identifier: Apache-2.0
"""The objective of pre-training and supervised fine-tuning."""

import dataclasses

import jax

from paxlike.config.configurable import configurable
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.training.objectives.objective import Objective


@configurable
@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
  """Next-token cross-entropy in nats, a mean over tokens weighted by `weights`.

  If the model has layers for multi-token prediction, their loss is added.
  """

  def weight(self, batch: Batch) -> jax.Array:
    return batch["weights"].sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    del reference
    context = context_of(batch, dropout)
    if model.mtp is not None:
      return model.losses(batch, context)
    x_BTD, _, aux = model.hidden(batch["inputs"], context)
    return model.token_loss(x_BTD, batch["targets"], batch["weights"]), aux
