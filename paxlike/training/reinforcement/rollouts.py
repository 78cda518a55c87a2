# SPDX-License-Identifier: Apache-2.0
"""How the answers of a step are sampled and rewarded."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.training.reinforcement.advantages import Advantages, Normalization, by_token, grpo


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """How the answers of a step are sampled and rewarded.

  Attributes:
    reward: A function of a module: see `paxlike.rewards`.
    num_prompts: Prompts of a step.
    group_size: Answers to each prompt.
    max_new_tokens: The most tokens of an answer.
    num_slots: Decode slots; see `Generator`.
    advantages: Computes advantages from rewards.
    normalization: Computes the weights of tokens in the loss.
    mask_truncated: Whether answers that were cut off have no loss.
    reward_seconds: Time limit of one reward.
    reward_workers: Processes that compute rewards.
  """

  reward: Callable[[str, Mapping[str, Any]], Any]
  num_prompts: ranges.Size
  group_size: ranges.Size
  max_new_tokens: ranges.Size
  num_slots: ranges.Size = 64
  advantages: Advantages = grpo
  normalization: Normalization = by_token
  mask_truncated: bool = False
  reward_seconds: ranges.Interval = 10.0
  reward_workers: ranges.Size = 4

  @property
  def text(self) -> str:
    """The answers of a step, for the header of a run."""
    answers = f"{self.group_size} answers of up to {self.max_new_tokens} tokens"
    return f"{self.num_prompts} prompts x {answers}"
