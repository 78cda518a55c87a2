# SPDX-License-Identifier: Apache-2.0
"""Advantages of tokens, from the values that a value head gives what is before them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.training.reinforcement.answers import Answer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gae:
  """Generalized advantage estimation (Schulman et al., 2016, arXiv:1506.02438).

  An answer is an episode whose actions are its tokens: the reward comes with the last one, after
  which the value is 0, whether the answer has ended or is cut off.

  Attributes:
    gae_lambda: Weight of later errors of the values: 0 trusts the values most (small variance), 1
      compares the rewards to come with the value (no bias).
    discount: Factor of a reward for each token that it is later (gamma).
    whitens: Whether the advantages of a step get mean 0 and variance 1 over its trained tokens.
  """

  gae_lambda: ranges.Fraction = 0.95
  discount: ranges.Share = 1.0
  whitens: bool = True

  def advantages(self, rewards_AT: np.ndarray, values_AT: np.ndarray) -> np.ndarray:
    """Returns the advantages [A, T] of tokens, not whitened.

    Both arrays are 0 after the end of an answer.
    """
    advantages_AT = np.zeros(rewards_AT.shape)
    last_A = next_A = np.zeros(len(rewards_AT))
    for token in reversed(range(rewards_AT.shape[1])):
      errors_A = rewards_AT[:, token] + self.discount * next_A - values_AT[:, token]
      last_A = errors_A + self.discount * self.gae_lambda * last_A
      advantages_AT[:, token], next_A = last_A, values_AT[:, token]
    return advantages_AT

  def set_advantages(
    self,
    answers: Sequence[Answer],
    trained: Sequence[bool] | np.ndarray,
    *,
    beta: float = 0.0,
    references: Sequence[np.ndarray] | None = None,
  ) -> dict[str, tuple[float, float]]:
    """Sets the advantages and returns of answers, in place.

    Args:
      answers: With rewards, values and log-probabilities.
      trained: Whether each has a loss.
      beta: Strength of the KL penalty in the rewards: from each, beta times the logarithm of the
        ratio of its token's probability to that under the reference model is subtracted.
      references: Log-probabilities of each answer's tokens under the reference model; None: there
        is no penalty.

    Returns:
      Metrics of the tokens with a loss, (sum, weight) each.
    """
    sizes_A = np.array([len(answer.tokens) for answer in answers])
    values_AT = padded([answer.values for answer in answers])
    rewards_AT = np.zeros(values_AT.shape)
    rewards_AT[np.arange(len(answers)), sizes_A - 1] = [answer.reward for answer in answers]
    is_token_AT = np.arange(values_AT.shape[1]) < sizes_A[:, None]
    is_trained_AT = is_token_AT & np.asarray(trained)[:, None]
    count, metrics = float(is_trained_AT.sum()), {}
    if references is not None:
      ratios_AT = padded([answer.log_probabilities for answer in answers]) - padded(references)
      rewards_AT -= beta * ratios_AT
      metrics["reference_kl"] = float(ratios_AT[is_trained_AT].sum()), count
    advantages_AT = self.advantages(rewards_AT, values_AT)
    returns_AT = advantages_AT + values_AT
    if count:
      trained_N, returns_N = advantages_AT[is_trained_AT], returns_AT[is_trained_AT]
      variance = float(returns_N.var())
      metrics["return"] = float(returns_N.sum()), count
      # An advantage is the error of a value.
      if variance:
        metrics["explained_variance"] = variance - float(trained_N.var()), variance
      if self.whitens:
        deviation = np.sqrt(trained_N.var(ddof=min(len(trained_N) - 1, 1)) + 1e-8)
        advantages_AT = (advantages_AT - trained_N.mean()) / deviation
    rows = zip(answers, sizes_A, advantages_AT, returns_AT, strict=True)
    for answer, size, advantages_T, returns_T in rows:
      answer.advantage, answer.returns = advantages_T[:size], returns_T[:size]
    return metrics


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
  """Returns arrays [T] of several lengths as one, float64 [A, T], with zeros at their ends."""
  array_AT = np.zeros((len(rows), max(map(len, rows))))
  for row_T, given in zip(array_AT, rows, strict=True):
    row_T[: len(given)] = given
  return array_AT
