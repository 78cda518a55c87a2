# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of training.

A multiplication and an addition are two FLOPs. A training step costs three times the forward pass,
two times for frozen weights, which need no gradients; recomputation is never counted. Attention is
counted in two ways: `full` over all T x S pairs (as arXiv:2204.02311 appendix B), and `causal` over
the half that a causal mask keeps.
"""

import dataclasses
import math
from typing import Any

from flax import nnx

from paxlike.layers.attention.attention import Attention
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.decoder import Decoder
from paxlike.layers.linear import Linear
from paxlike.layers.lora import Lora
from paxlike.layers.module import Definition
from paxlike.layers.moe.moe import Moe
from paxlike.layers.stack import layout_of


@dataclasses.dataclass(frozen=True)
class TrainingFlops:
  """FLOPs per token of one training step.

  Attributes:
    full: With attention over all pairs of tokens within the window.
    causal: With attention over the pairs that the causal mask keeps.
  """

  full: float
  causal: float


def per_token(definition: Definition, seq_len: int) -> TrainingFlops:
  """Returns the FLOPs per token of training on sequences of `seq_len` tokens."""
  layout = layout_of(definition.module)
  weights = full = causal = 0

  def training(forward: float, *weight: Any) -> float:
    return (3 if definition.weights[".".join(map(str, weight))].trained else 2) * forward

  for path, module in nnx.iter_modules(definition.module):
    if isinstance(module, Linear):
      weights += training(2 * math.prod(module.w.get_value().shape), *path, "w")
    if isinstance(module, Lora):
      sizes = (math.prod(weight.get_value().shape) for weight in (module.a, module.b))
      weights += training(2 * sum(sizes), *path, "a")
    location = layout.locate(".".join(map(str, path)) + ".")
    repeats = len(location.layers) if location and location.stacked else 1
    if isinstance(module, Moe):
      weights += training(module.expert_flops, *path, "experts", "up", "w")
    if isinstance(module, Attention | LatentAttention):
      scores = module.score_flops(seq_len)
      full, causal = full + repeats * scores[0], causal + repeats * scores[1]
    if isinstance(module, Decoder) and module.head is None:
      size = math.prod(module.embedding.table.get_value().shape)
      weights += training(2 * size, *path, "embedding", "table")
  return TrainingFlops(full=weights + 3 * full, causal=weights + 3 * causal)


def active_params(definition: Definition) -> int:
  """Returns the number of active parameters per token: of the experts, only the top-k."""
  count = definition.num_params
  for _, module in nnx.iter_modules(definition.module):
    if isinstance(module, Moe):
      weights = nnx.to_flat_state(nnx.state(module.experts))
      of_experts = sum(math.prod(param.get_value().shape) for _, param in weights)
      count -= of_experts * (module.num_experts - module.num_chosen) // module.num_experts
  return count
