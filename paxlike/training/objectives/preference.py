# SPDX-License-Identifier: Apache-2.0
"""Objectives on pairs of a chosen and a rejected answer."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.layers.loss import cross_entropy
from paxlike.training.objectives.objective import Objective


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(Objective):
  """Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290), a mean over pairs.

  In each sequence, segment 1 is the chosen answer and segment 2 the rejected one. Reported FLOPs
  exclude the reference model.

  Attributes:
    beta: Strength of the KL penalty towards the reference.
    label_smoothing: Assumed probability that a preference label is flipped.
  """

  beta: ranges.Factor = 0.1
  label_smoothing: ranges.Smoothing = 0.0
  needs_reference = True

  def weight(self, batch: Batch) -> jax.Array:
    return _is_pair(batch).sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    assert reference is not None
    log_B2, aux = _log_probabilities(model, batch, dropout)
    before_B2, _ = _log_probabilities(reference, batch, None)
    rewards_B2 = self.beta * (log_B2 - jax.lax.stop_gradient(before_B2))
    margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
    right_B, wrong_B = jax.nn.log_sigmoid(margin_B), jax.nn.log_sigmoid(-margin_B)
    loss_B = -(1 - self.label_smoothing) * right_B - self.label_smoothing * wrong_B
    is_pair_B = _is_pair(batch)
    reports = {
      "reward_accuracy": margin_B > 0,
      "reward_margin": margin_B,
      "reward_chosen": rewards_B2[:, 0],
      "reward_rejected": rewards_B2[:, 1],
    }
    sums = {name: (of_B * is_pair_B).sum() for name, of_B in reports.items()}
    metrics = {name: jnp.stack([total, is_pair_B.sum()]) for name, total in sums.items()}
    return (loss_B * is_pair_B).sum(), aux._replace(metrics=aux.metrics | metrics)


def _is_pair(batch: Batch) -> jax.Array:
  """Returns float32 [B]: 1 where both answers have tokens, 0 for padding or truncated answers."""
  answer_BT2 = batch["segments"][..., None] == jnp.array([1, 2])
  return (answer_BT2 & (batch["weights"] > 0)[..., None]).any(1).all(-1).astype(jnp.float32)


def _log_probabilities(
  model: Decoder, batch: Batch, dropout: jax.Array | None
) -> tuple[jax.Array, Aux]:
  """Returns (log-probabilities of both answers, float32 [B, 2], the layers' Aux)."""
  x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))
  loss_BT = model.map_logits(cross_entropy, x_BTD, batch["targets"])
  answer_BT2 = batch["segments"][..., None] == jnp.array([1, 2])
  return -((loss_BT * batch["weights"])[..., None] * answer_BT2).sum(1), aux
