# SPDX-License-Identifier: Apache-2.0
"""Objectives on pairs of a chosen and a rejected answer, as functions of their log-probabilities.

In each sequence, segment 1 is the chosen answer and segment 2 the rejected one.
"""

import abc
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.aux_losses import Aux
from paxlike.layers.decoder import Batch, Decoder, context_of
from paxlike.layers.loss import cross_entropy
from paxlike.training.objectives.objective import Objective


class Answers(NamedTuple):
  """A model's log-probabilities of the two answers of each pair.

  Attributes:
    log_B2: float32, their log-probabilities.
    num_tokens_B2: float32, their numbers of tokens.
    loss_BT: float32, the cross-entropies of all targets, prompts included.
  """

  log_B2: jax.Array
  num_tokens_B2: jax.Array
  loss_BT: jax.Array

  @property
  def mean_B2(self) -> jax.Array:
    """Log-probabilities per token; -1 for an answer without tokens."""
    mean_B2 = self.log_B2 / jnp.maximum(self.num_tokens_B2, 1)
    return jnp.where(self.num_tokens_B2 > 0, mean_B2, -1.0)


class PairObjective(Objective):
  """A loss of the difference of two answers' rewards, a mean over pairs.

  A reward is a function of an answer's log-probability under the model and, for some losses, under
  the reference model. Pairs of which an answer was truncated away have no loss. Reported FLOPs
  exclude the reference model.
  """

  @abc.abstractmethod
  def rewards(self, answers: Answers, before: Answers | None) -> jax.Array:
    """Returns the rewards of both answers, float32 [B, 2].

    Args:
      answers: The answers under the model.
      before: The same under the reference model; None if the objective needs none.
    """

  @abc.abstractmethod
  def losses(self, margin_B: jax.Array) -> jax.Array:
    """Returns the losses of pairs whose rewards differ by `margin_B`, float32 [B]."""

  def weight(self, batch: Batch) -> jax.Array:
    return is_pair(batch).sum()

  def total(
    self, model: Decoder, reference: Decoder | None, batch: Batch, dropout: jax.Array | None
  ) -> tuple[jax.Array, Aux]:
    answers, aux = answers_of(model, batch, dropout)
    before = None
    if reference is not None:
      before, _ = answers_of(reference, batch, None)
      before = jax.lax.stop_gradient(before)
    rewards_B2 = self.rewards(answers, before)
    margin_B, is_pair_B = rewards_B2[:, 0] - rewards_B2[:, 1], is_pair(batch)
    metrics = pair_metrics(rewards_B2, is_pair_B)
    loss = (self.losses(margin_B) * is_pair_B).sum() + self.further(answers, batch)
    return loss, aux._replace(metrics=aux.metrics | metrics)

  def further(self, answers: Answers, batch: Batch) -> jax.Array | float:
    """Returns a loss of the chosen answers alone, summed over the pairs of a microbatch."""
    del answers, batch
    return 0.0


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dpo(PairObjective):
  """Direct preference optimization (Rafailov et al., 2023, arXiv:2305.18290).

  Attributes:
    beta: Strength of the KL penalty towards the reference.
    label_smoothing: Assumed probability that a preference label is flipped.
  """

  beta: ranges.Factor = 0.1
  label_smoothing: ranges.Smoothing = 0.0
  needs_reference = True

  def rewards(self, answers: Answers, before: Answers | None) -> jax.Array:
    assert before is not None
    return self.beta * (answers.log_B2 - before.log_B2)

  def losses(self, margin_B: jax.Array) -> jax.Array:
    right_B, wrong_B = jax.nn.log_sigmoid(margin_B), jax.nn.log_sigmoid(-margin_B)
    return -(1 - self.label_smoothing) * right_B - self.label_smoothing * wrong_B


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ipo(PairObjective):
  """Identity preference optimization (Azar et al., 2023, arXiv:2310.12036), equation 17.

  The reward is the change of the log-probability per token, as the authors computed it and TRL
  does; the loss is the squared distance of the margin from 1 / (2 beta).

  Attributes:
    beta: Strength of the KL penalty towards the reference, tau in the paper.
  """

  beta: ranges.PositiveFloat = 0.1
  needs_reference = True

  def rewards(self, answers: Answers, before: Answers | None) -> jax.Array:
    assert before is not None
    return answers.mean_B2 - before.mean_B2

  def losses(self, margin_B: jax.Array) -> jax.Array:
    return jnp.square(margin_B - 1 / (2 * self.beta))


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SimPo(PairObjective):
  """Simple preference optimization (Meng et al., 2024, arXiv:2405.14734), without a reference.

  Attributes:
    beta: Multiplies the log-probability per token, which gives the reward.
    gamma: Target margin between the rewards.
  """

  beta: ranges.Factor = 2.0
  gamma: ranges.NonNegativeFloat = 1.0

  def rewards(self, answers: Answers, before: Answers | None) -> jax.Array:
    del before
    return self.beta * answers.mean_B2

  def losses(self, margin_B: jax.Array) -> jax.Array:
    return -jax.nn.log_sigmoid(margin_B - self.gamma)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Orpo(PairObjective):
  """Odds ratio preference optimization (Hong et al., 2024, arXiv:2403.07691), without a reference.

  The reward is the logarithm of the odds p / (1 - p), where log p is the log-probability per token.
  The loss also has the cross-entropy of the chosen conversation, a mean over all tokens of the
  microbatch's chosen conversations, prompts included, as in the authors' code and TRL.

  Attributes:
    odds_weight: Weight of the loss of the odds ratio, lambda in the paper.
  """

  odds_weight: ranges.Factor = 0.1

  def rewards(self, answers: Answers, before: Answers | None) -> jax.Array:
    del before
    return answers.mean_B2 - jax.nn.log1mexp(-answers.mean_B2)

  def losses(self, margin_B: jax.Array) -> jax.Array:
    return -self.odds_weight * jax.nn.log_sigmoid(margin_B)

  def further(self, answers: Answers, batch: Batch) -> jax.Array:
    is_pair_B = is_pair(batch)
    is_chosen_BT = (batch["segments"] == 1) * is_pair_B[:, None]
    mean = (answers.loss_BT * is_chosen_BT).sum() / jnp.maximum(is_chosen_BT.sum(), 1)
    return mean * is_pair_B.sum()


def is_pair(batch: Batch) -> jax.Array:
  """Returns float32 [B]: 1 where both answers have tokens, 0 for padding or truncated answers."""
  return (weights_of_answers(batch) > 0).any(1).all(-1).astype(jnp.float32)


def pair_metrics(rewards_B2: jax.Array, is_pair_B: jax.Array) -> dict[str, jax.Array]:
  """Returns the metrics of the rewards of both answers, [sum, number of pairs] each."""
  margin_B = rewards_B2[:, 0] - rewards_B2[:, 1]
  reports = {
    "reward_accuracy": margin_B > 0,
    "reward_margin": margin_B,
    "reward_chosen": rewards_B2[:, 0],
    "reward_rejected": rewards_B2[:, 1],
  }
  sums = {name: (of_B * is_pair_B).sum() for name, of_B in reports.items()}
  return {name: jnp.stack([total, is_pair_B.sum()]) for name, total in sums.items()}


def weights_of_answers(batch: Batch) -> jax.Array:
  """Returns the weights of the targets of each answer, float32 [B, T, 2]."""
  answer_BT2 = batch["segments"][..., None] == jnp.array([1, 2])
  return batch["weights"][..., None] * answer_BT2


def answers_of(model: Decoder, batch: Batch, dropout: jax.Array | None) -> tuple[Answers, Aux]:
  """Returns (a model's log-probabilities of the answers of a batch, the layers' Aux)."""
  x_BTD, _, aux = model.hidden(batch["inputs"], context_of(batch, dropout))
  loss_BT = model.map_logits(cross_entropy, x_BTD, batch["targets"])
  weights_BT2 = weights_of_answers(batch)
  log_B2 = -(loss_BT[..., None] * weights_BT2).sum(1)
  return Answers(log_B2, weights_BT2.sum(1), loss_BT), aux
