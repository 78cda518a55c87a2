# SPDX-License-Identifier: Apache-2.0
"""The part that families with experts share: knobs, and a layer of experts made of them."""

from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.config import ranges
from paxlike.experiment import Experiment


class Moe(Experiment):
  """A mixin: `class Mixtral(Moe, Mistral)` has experts in every layer."""

  NUM_EXPERTS: ranges.Size = 8  #: Experts of a layer.
  NUM_EXPERTS_PER_TOKEN: ranges.Size = 2  #: Experts that a token sees.
  EXPERT_DIMS: ranges.Size | None = None  #: Width of an expert. None: HIDDEN_DIMS.
  MOE_DISPATCH: Literal["dropless", "capacity"] = "dropless"  #: How tokens come to experts.
  #: Places of experts over those needed if all were used equally.
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
    """The feed-forward layer of the family without experts."""
    return super().mlp()

  def experts(self, dense: fdl.Partial[layers.Mlp]) -> fdl.Partial[layers.Experts]:
    """Experts that are made as the `dense` layer is."""
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
    """The router, which is always computed in float32."""
    return self.linear("router")

  def expert_linear(self, role: str) -> fdl.Partial[layers.ExpertLinear]:
    """A linear map of the experts."""
    return fdl.Partial(layers.ExpertLinear, role=role, init=self.init())

  def dispatch(self) -> fdl.Partial | object:
    """How tokens come to their experts."""
    if self.MOE_DISPATCH == "capacity":
      return fdl.Config(layers.dispatch.Capacity, factor=self.CAPACITY_FACTOR)
    return layers.dispatch.dropless
