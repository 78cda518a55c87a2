# SPDX-License-Identifier: Apache-2.0
"""The objective of reward models."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.layers.reward_model import RewardModel
from paxlike.training.objectives.objective import Objective
from paxlike.training.objectives.preference import is_pair, pair_metrics, weights_of_answers


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class BradleyTerry(Objective):
  """The negative log-probability that the chosen answer is preferred, a mean over pairs.

  It is that of Bradley and Terry (1952): the sigmoid of the difference of rewards. In each
  sequence, segment 1 is the chosen conversation and segment 2 the rejected one; the target with
  weight is that of the last token. Pairs of which a conversation was truncated have no loss.

  Attributes:
    centering: Weight of the squared sum of the rewards of a pair, which keeps rewards near 0
      (Eisenstein et al., 2023, arXiv:2312.09244).
  """

  centering: ranges.NonNegativeFloat = 0.0

  def weight(self, batch: Batch) -> jax.Array:
    return is_pair(batch).sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    del reference
    if not isinstance(model, RewardModel):
      raise UserError("the objective BradleyTerry trains a RewardModel: see datasets.RewardPairs.")
    x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))
    rewards_B2 = (model.rewards(x_BTD)[..., None] * weights_of_answers(batch)).sum(1)
    loss_B = -jax.nn.log_sigmoid(rewards_B2[:, 0] - rewards_B2[:, 1])
    if self.centering:
      loss_B += self.centering * jnp.square(rewards_B2.sum(-1))
    is_pair_B = is_pair(batch)
    metrics = pair_metrics(rewards_B2, is_pair_B)
    return (loss_B * is_pair_B).sum(), aux._replace(metrics=aux.metrics | metrics)
