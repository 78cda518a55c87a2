# SPDX-License-Identifier: Apache-2.0
"""Training objectives: a loss summed over a batch and the weight that a step divides it by."""

from paxlike.training.objectives.distillation import Gkd, OnPolicyGkd
from paxlike.training.objectives.kto import Kto
from paxlike.training.objectives.next_token import NextToken
from paxlike.training.objectives.objective import Objective, shares_base, without_adapters
from paxlike.training.objectives.policy import Grpo
from paxlike.training.objectives.ppo import Ppo
from paxlike.training.objectives.preference import Dpo, Ipo, Orpo, SimPo
from paxlike.training.objectives.reward import BradleyTerry

__all__ = [
  "BradleyTerry",
  "Dpo",
  "Gkd",
  "Grpo",
  "Ipo",
  "Kto",
  "NextToken",
  "Objective",
  "OnPolicyGkd",
  "Orpo",
  "Ppo",
  "SimPo",
  "shares_base",
  "without_adapters",
]
