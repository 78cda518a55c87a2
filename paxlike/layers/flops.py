# SPDX-License-Identifier: Apache-2.0
"""Model FLOPs of training.

A multiplication and an addition are two FLOPs. A training step costs three times the forward pass,
two times for frozen weights, which need no gradients; recomputation is never counted. Attention is
counted in two ways: `full` over all T x S pairs (as arXiv:2204.02311 appendix B), and `causal` over
the half that a causal mask keeps. For both, layers with a recurrent state count its updates and
reads. Sparse attention counts the scores of its indexer, which are not differentiated, and the
pairs of a query and a selected token.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from paxlike.layers.attention.attention import Attention
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.attention.sparse_latent_attention import SparseLatentAttention
from paxlike.layers.module import Definition
from paxlike.layers.moe.moe import Moe
from paxlike.layers.recurrent.mixer import RecurrentMixer
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
  logits = 1 + num_further(definition)  # The output projection runs as often as that.
  weights = sum(
    (3 if spec.trained else 2) * spec.flops * (logits if "vocab" in spec.dims else 1)
    for spec in definition.weights.values()
  )
  full, causal = (
    weights + 3 * forward - 2 * selection
    for forward, selection in zip(
      attention_flops(definition, seq_len), _selection_flops(definition, seq_len), strict=True
    )
  )
  return TrainingFlops(full=full, causal=causal)


def num_further(definition: Definition) -> int:
  """Returns the number of layers for multi-token prediction."""
  mtp: Any = getattr(definition.module, "mtp", None)
  return 0 if mtp is None else len(mtp.layers)


def attention_flops(definition: Definition, seq_len: int) -> tuple[float, float]:
  """Returns attention's forward FLOPs per token (logits, weighted values): (full, causal)."""
  full = causal = 0
  for module, count in modules(definition):
    if isinstance(module, Attention | LatentAttention | RecurrentMixer):
      of_layer = module.score_flops(seq_len)
      full, causal = full + count * of_layer[0], causal + count * of_layer[1]
  return full, causal


def _selection_flops(definition: Definition, seq_len: int) -> tuple[float, float]:
  """Returns the FLOPs of `attention_flops` that have no backward pass: (full, causal)."""
  full = causal = 0.0
  for module, count in modules(definition):
    if isinstance(module, SparseLatentAttention):
      of_layer = module.selection_flops(seq_len)
      full, causal = full + count * of_layer[0], causal + count * of_layer[1]
  return full, causal


def modules(definition: Definition) -> Iterator[tuple[Any, int]]:
  """Yields each module, and the number of layers that are stacked in it."""
  layout = layout_of(definition.module)
  for path, module in nnx.iter_modules(definition.module):
    location = layout.locate(".".join(map(str, path)) + ".")
    yield module, len(location.layers) if location and location.stacked else 1


def matmul_dtype(definition: Definition) -> str:
  """Returns the dtype in which the matmuls of the blocks run, or else of all layers.

  It is "fp8", "int8" or a compute dtype.
  """
  matmuls = (spec.matmul for spec in definition.weights.values())
  found = {one.operands for one in matmuls if one is not None and one.operands}
  model: Any = definition.module
  return min(found, default=str(jnp.dtype(model.embedding.dtype)))


def active_params(definition: Definition) -> int:
  """Returns the number of active parameters per token: of the experts, only the top-k."""
  count = definition.num_params
  for _, module in nnx.iter_modules(definition.module):
    if isinstance(module, Moe):
      weights = nnx.to_flat_state(nnx.state(module.experts))
      of_experts = sum(math.prod(param.get_value().shape) for _, param in weights)
      count -= of_experts * (module.num_experts - module.num_chosen) // module.num_experts
  return count
