# SPDX-License-Identifier: Apache-2.0
"""PPO: the clipped policy gradient beside the loss of a value head."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.training.objectives.policy import Grpo, Sums, means_of_targets


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ppo(Grpo):
  """PPO (Schulman et al., 2017, arXiv:1707.06347) of a policy and a value head on one backbone.

  To the loss of `Grpo`, it adds value_weight (V - R)^2 / 2 for each token, with the same `weights`.
  V is the value and R the target, the advantage plus the value of the model that sampled it. With
  `value_clip`, it is max((V - R)^2, (V' - R)^2) / 2, where V' is V clipped to that value +-
  value_clip. Batches also have float32 [B, T] `returns` and `old_values`.

  Attributes:
    value_weight: Weight of the value loss.
    value_clip: How far a value may move from that of the model that sampled the answers before its
      gradient vanishes; None: as far as it will.
    reward_kl: Whether `beta` is the strength of a KL penalty in the rewards, which `Gae` subtracts
      from them, instead of one in the loss.
  """

  value_weight: ranges.Weight = 0.5
  value_clip: ranges.Factor | None = None
  reward_kl: bool = True

  @property
  def penalizes(self) -> bool:
    return super().penalizes and not self.reward_kl

  def loss(
    self, log_probabilities_BT: jax.Array, batch: Mapping[str, Any]
  ) -> tuple[jax.Array, Sums]:
    """Returns (the loss of a batch, its metrics); `values` of the batch are differentiated, too."""
    of_policy, sums = super().loss(log_probabilities_BT, batch)
    weights_BT, values_BT, old_BT = batch["weights"], batch["values"], batch["old_values"]
    is_target_BT = weights_BT > 0
    loss_BT = jnp.square(values_BT - batch["returns"]) / 2
    of_tokens = {}
    if self.value_clip is not None:
      near_BT = jnp.clip(values_BT, old_BT - self.value_clip, old_BT + self.value_clip)
      clipped_BT = jnp.square(near_BT - batch["returns"]) / 2
      of_tokens["value_clipped_fraction"] = clipped_BT > loss_BT
      loss_BT = jnp.maximum(loss_BT, clipped_BT)
    of_tokens["value_loss"] = loss_BT
    sums |= means_of_targets(of_tokens, is_target_BT)
    return of_policy + self.value_weight * (loss_BT * weights_BT).sum(), sums
