# SPDX-License-Identifier: Apache-2.0
"""Mixins for families with experts: knobs and the mixture-of-experts layer."""

from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.config import ranges
from paxlike.experiment import Experiment

# Keys of a `SigmoidMoe` in `config.json`.
SIGMOID_MOE_KEYS = {
  "moe_intermediate_size": "EXPERT_DIMS",
  "n_routed_experts": "NUM_EXPERTS",
  "num_experts_per_tok": "NUM_EXPERTS_PER_TOKEN",
  "n_group": "NUM_EXPERT_GROUPS",
  "topk_group": "NUM_EXPERT_GROUPS_PER_TOKEN",
  "routed_scaling_factor": "ROUTED_SCALE",
}


class Moe(Experiment):
  """A mixin: `class Mixtral(Moe, Mistral)` has experts in every layer."""

  NUM_EXPERTS: ranges.Size = 8  #: Experts per layer.
  NUM_EXPERTS_PER_TOKEN: ranges.Size = 2  #: Experts per token.
  EXPERT_DIMS: ranges.Size | None = None  #: Width of an expert. None: HIDDEN_DIMS.
  #: How tokens are dispatched to experts; capacity drops tokens beyond an expert's slots.
  MOE_DISPATCH: Literal["dropless", "capacity"] = "dropless"
  #: Slots of experts, relative to the number needed under a balanced load.
  CAPACITY_FACTOR: ranges.Capacity = 2.0
  BALANCE_LOSS_WEIGHT: ranges.Weight = 0.01  #: Weight of the load-balancing loss of each layer.
  ROUTER_Z_LOSS_WEIGHT: ranges.Weight = 0.0  #: Weight of the router's z-loss of each layer.

  def mlp(self) -> fdl.Partial:
    return fdl.Partial(
      layers.Moe,
      num_experts=self.NUM_EXPERTS,
      num_chosen=self.NUM_EXPERTS_PER_TOKEN,
      router=self.router(),
      experts=self.experts(self.dense_mlp()),
      dispatch=self.dispatch(),
      balance_loss=self.BALANCE_LOSS_WEIGHT,
      z_loss=self.ROUTER_Z_LOSS_WEIGHT,
    )

  def dense_mlp(self) -> fdl.Partial[layers.Mlp]:
    """Returns the feed-forward layer of the family without experts."""
    return super().mlp()

  def experts(self, dense: fdl.Partial[layers.Mlp]) -> fdl.Partial[layers.Experts]:
    """Returns experts with the structure of the `dense` layer."""
    hidden = self.EXPERT_DIMS
    return fdl.Partial(
      layers.Experts,
      hidden_dim=dense.hidden_dim if hidden is None else hidden,
      up=self.expert_linear("up"),
      down=self.expert_linear("down"),
      gate=None if getattr(dense, "gate", None) is None else self.expert_linear("gate"),
      activation=dense.activation,
    )

  def router(self) -> fdl.Partial[layers.Linear]:
    """Returns the router, which always computes in float32."""
    return self.linear("router")

  def expert_linear(self, role: str) -> fdl.Partial[layers.ExpertLinear]:
    """Returns a linear map of the experts."""
    return fdl.Partial(layers.ExpertLinear, role=role, init=self.init())

  def dispatch(self) -> fdl.Partial | object:
    """Returns the dispatch of tokens to experts."""
    if self.MOE_DISPATCH == "capacity":
      return fdl.Config(layers.dispatch.Capacity, factor=self.CAPACITY_FACTOR)
    return layers.dispatch.dropless


class SigmoidMoe(Moe):
  """A mixin: the router of DeepSeek-V3, and an expert that processes every token.

  A token's experts are those of the largest sigmoids plus a bias, which balances their load.
  """

  NUM_EXPERT_GROUPS: ranges.Size = 1  #: Groups of experts.
  NUM_EXPERT_GROUPS_PER_TOKEN: ranges.Size = 1  #: Groups that a token's experts are from.
  ROUTED_SCALE: ranges.Factor = 2.5  #: Sum of the weights of a token's experts.
  ROUTER_BIAS_RATE: ranges.Fraction = 0.001  #: Change of an expert's router bias per step.

  def mlp(self) -> fdl.Partial:
    moe = super().mlp()
    moe.choice = fdl.Partial(
      layers.routing.sigmoid_choice,
      num_groups=self.NUM_EXPERT_GROUPS,
      num_chosen_groups=self.NUM_EXPERT_GROUPS_PER_TOKEN,
      scale=self.ROUTED_SCALE,
    )
    moe.bias_rate = self.ROUTER_BIAS_RATE
    moe.shared = self.dense_mlp()
    return moe
