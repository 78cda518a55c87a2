# SPDX-License-Identifier: Apache-2.0
"""How the answers of a step are sampled and rewarded."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.training.reinforcement.advantages import Advantages, Normalization, by_token, grpo
from paxlike.training.reinforcement.model_reward import ModelReward
from paxlike.training.reinforcement.values import Gae


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rollouts:
  """How the answers of a step are sampled and rewarded.

  Attributes:
    reward: A function of a module: see `paxlike.rewards`. None: there is none.
    reward_model: A reward model, whose rewards are added. None: there is none. Without both, a
      teacher judges the answers.
    num_prompts: Prompts of a step.
    most_prompts: Prompts that a step tries at most, to replace those whose answers all have the
      same reward, from which nothing can be learned (DAPO's dynamic sampling). None: `num_prompts`,
      of which none is replaced.
    group_size: Answers to each prompt.
    num_updates: Updates of a step, each on all its answers; from the second one on, the policy is
      no longer the one that sampled them.
    behind: How many steps older than the weights that are trained on answers are those that sample
      them.
    importance_cap: The cap of importance ratios that correct for that; None: the probability ratio
      of the loss is to the policy that sampled. See `pending.importance`.
    max_new_tokens: The most tokens of an answer.
    num_slots: Decode slots; see `Generator`.
    advantages: Computes advantages from rewards; `Gae`: from those and the values of a value head.
    normalization: Computes the weights of tokens in the loss.
    mask_truncated: Whether answers that were cut off have no loss.
    reward_seconds: Time limit of one reward.
    reward_workers: Processes that compute rewards.
  """

  reward: Callable[[str, Mapping[str, Any]], Any] | None
  reward_model: ModelReward | None = None
  num_prompts: ranges.Size
  group_size: ranges.Size
  most_prompts: ranges.Size | None = None
  num_updates: ranges.Size = 1
  behind: Literal[0, 1] = 0
  importance_cap: ranges.Factor | None = None
  max_new_tokens: ranges.Size
  num_slots: ranges.Size = 64
  advantages: Advantages | Gae = grpo
  normalization: Normalization = by_token
  mask_truncated: bool = False
  reward_seconds: ranges.Interval = 10.0
  reward_workers: ranges.Size = 4

  @property
  def num_given(self) -> int:
    """The number of prompts that a step takes from the data."""
    return self.most_prompts or self.num_prompts

  @property
  def text(self) -> str:
    """The answers of a step, for the header of a run."""
    answers = f"{self.group_size} answers of up to {self.max_new_tokens} tokens"
    updates = f", {self.num_updates} updates" if self.num_updates > 1 else ""
    ahead = ", sampled ahead" if self.behind else ""
    return f"{self.num_prompts} prompts x {answers}{updates}{ahead}"
