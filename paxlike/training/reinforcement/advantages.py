# SPDX-License-Identifier: Apache-2.0
"""Advantages of answers to the same prompt, and how the losses of their tokens are normalized.

Float64 arrays on the host: rewards [P, G] are those of G answers to each of P prompts.
"""

from collections.abc import Callable

import numpy as np

from paxlike.config.configurable import configurable

# rewards_PG -> advantages_PG.
Advantages = Callable[[np.ndarray], np.ndarray]
# (number of tokens of each answer [A], the most an answer may have) -> weight of each token [A].
Normalization = Callable[[np.ndarray, int], np.ndarray]


@configurable(name="advantages.grpo")
def grpo(rewards_PG: np.ndarray) -> np.ndarray:
  """Rewards minus their mean, divided by their standard deviation (Shao et al., 2024)."""
  deviations = rewards_PG.std(1, ddof=1, keepdims=True) if rewards_PG.shape[1] > 1 else 0.0
  return dr_grpo(rewards_PG) / (deviations + 1e-4)


@configurable(name="advantages.dr_grpo")
def dr_grpo(rewards_PG: np.ndarray) -> np.ndarray:
  """Rewards minus the mean of the group (Dr. GRPO; Liu et al., 2025, arXiv:2503.20783)."""
  return rewards_PG - rewards_PG.mean(1, keepdims=True)


@configurable(name="advantages.rloo")
def rloo(rewards_PG: np.ndarray) -> np.ndarray:
  """Rewards minus the mean of the others of the group (Ahmadian et al., 2024, arXiv:2402.14740)."""
  size = rewards_PG.shape[1]
  return dr_grpo(rewards_PG) * (size / max(size - 1, 1))


@configurable(name="advantages.by_answer")
def by_answer(num_tokens_A: np.ndarray, limit: int) -> np.ndarray:
  """The mean over answers of the mean over their tokens (GRPO)."""
  del limit
  return 1 / (np.maximum(num_tokens_A, 1) * max(len(num_tokens_A), 1))


@configurable(name="advantages.by_token")
def by_token(num_tokens_A: np.ndarray, limit: int) -> np.ndarray:
  """The mean over the tokens of all answers (DAPO; Yu et al., 2025, arXiv:2503.14476)."""
  del limit
  return np.full(len(num_tokens_A), 1 / max(num_tokens_A.sum(), 1))


@configurable(name="advantages.by_limit")
def by_limit(num_tokens_A: np.ndarray, limit: int) -> np.ndarray:
  """The sum over tokens, divided by what they could be at most (Dr. GRPO)."""
  return np.full(len(num_tokens_A), 1 / (limit * max(len(num_tokens_A), 1)))
