# SPDX-License-Identifier: Apache-2.0
"""muP and CompleteP: hyperparameters of a small model, carried over to a wide and deep one.

With maximal update parametrization (muP; Yang et al., 2022, arXiv:2203.03466), activations change
by as much in a step at any width; CompleteP (Dey et al., 2025, arXiv:2505.01618) holds at any depth
too. The factors here are those of Table 1 of the latter (its alpha is 1), for a model `width` times
as wide and `depth` times as deep as the base model. Initial weights and scales of the forward pass
are changed by `fiddlers.parametrize`.
"""

import dataclasses
from typing import Literal

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.module import WeightSpec
from paxlike.training.optimizers.newton_schulz import matrix


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Parametrization:
  """The factors of learning rate and epsilon of each weight.

  Attributes:
    width: The width of the model over that of the base model.
    depth: Its number of layers over that of the base model; 1 for muP, which is for widths alone.
    rule: The size of a matrix's update before the rate: elements of about 1 ("elementwise", as by
      Adam), a spectral norm of 1 ("orthogonal", as by Muon), or one that grows as the root of the
      width ("orthogonal_rms").
  """

  width: ranges.PositiveFloat
  depth: ranges.PositiveFloat = 1.0
  rule: Literal["elementwise", "orthogonal", "orthogonal_rms"] = "elementwise"

  def rate(self, spec: WeightSpec) -> float:
    """Returns the factor of a weight's learning rate; its weight decay per step stays as it is."""
    if not reads_width(spec):
      return 1.0
    if self.rule == "elementwise" or matrix(spec) is None:
      return 1 / self.width
    power = 0.5 if self.rule == "orthogonal_rms" else 0.0
    return self.width ** -(power if writes_width(spec) else power + 0.5)

  def epsilon(self, spec: WeightSpec) -> float:
    """Returns the factor of Adam's epsilon: that of the weight's gradients."""
    if spec.dims[-1:] == ("vocab",):
      return 1.0  # The head is initialized by 1 / width instead, so its gradients do not shrink.
    in_block = "vocab" not in spec.dims and "position" not in spec.dims
    return 1 / self.width / (self.depth if in_block else 1.0)


# Dims that grow with the width of a model.
_WIDTHS = {"model", "ffn", "heads", "kv_heads", "rank", "concat"}


def reads_width(spec: WeightSpec) -> bool:
  """Whether a weight is a matrix whose inputs grow with the width of the model.

  A table of embeddings is not, though it contracts the width where it serves as a head.
  """
  return (
    bool(_WIDTHS.intersection(spec.contracted))
    and spec.dims[:1] != ("vocab",)
    and "adapter" not in spec.dims
  )


def writes_width(spec: WeightSpec) -> bool:
  """Whether the outputs of a matrix grow with the width of the model."""
  return bool(_WIDTHS.intersection(set(spec.dims) - set(spec.contracted)))
