# SPDX-License-Identifier: Apache-2.0
"""Muon, which orthogonalizes the momentum of weight matrices."""

import math
from collections.abc import Set
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import topology
from paxlike.layers.module import Params
from paxlike.layers.precision.rounding import in_dtype
from paxlike.training.optimizers.elementwise import MomentDtype
from paxlike.training.optimizers.newton_schulz import Matrix, matrix, orthogonalized
from paxlike.training.optimizers.optimizer import Transform, Weights, divided

Scale = Literal["rms", "width"]


class MuonState(NamedTuple):
  """The state of `muon`.

  Attributes:
    count: int32, completed updates.
    momentum: In the moments' dtype.
  """

  count: jax.Array
  momentum: Params


@configurable
def muon(
  others: Transform,
  *,
  momentum: ranges.Probability = 0.95,
  nesterov: bool = True,
  steps: ranges.Positive = 5,
  scale: Scale = "rms",
  moment_dtype: MomentDtype = "float32",
  over_data: bool = False,
) -> Transform:
  """Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon) for matrices of blocks.

  Newton-Schulz iterations run in bfloat16, on CPUs in float32.

  Args:
    others: The rule for embeddings, output projection, biases and norms.
    momentum: Decay rate of the momentum, an average of gradients.
    nesterov: Whether the gradient is averaged with the momentum once more.
    steps: Newton-Schulz iterations.
    scale: "rms": 0.2 sqrt(max(inputs, outputs)), so that updates are about as large as Adam's (Liu
      et al., 2025, arXiv:2502.16982). "width": sqrt(max(1, outputs / inputs)), as by Jordan.
    moment_dtype: Storage dtype of the momentum; bfloat16 uses stochastic rounding.
    over_data: Whether the state is sharded over `data`, as in `descent`.
  """

  def of_matrices(weights: Weights) -> optax.GradientTransformation:
    hows = {name: how for name, spec in weights.items() if (how := matrix(spec)) is not None}

    def init(params: Any) -> Any:
      zeros = {name: jnp.zeros(w.shape, moment_dtype) for name, w in params.items()}
      return MuonState(jnp.zeros((), jnp.int32), zeros)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      del params
      old = {name: m.astype(jnp.float32) for name, m in state.momentum.items()}
      means: Any = optax.incremental_update(updates, old, 1 - momentum)
      blended: Any = optax.incremental_update(updates, means, 1 - momentum)
      found = _orthogonalized(blended if nesterov else means, weights, steps, over_data=over_data)
      scaled = {name: _factor(hows[name], scale) * x for name, x in found.items()}
      stored = {n: in_dtype(m, jnp.dtype(moment_dtype), draw=state.count) for n, m in means.items()}
      return scaled, MuonState(state.count + 1, stored)

    return optax.GradientTransformation(init, update)

  return divided(_matrices, of_matrices, others)


def _matrices(weights: Weights) -> Set[str]:
  return {name for name, spec in weights.items() if matrix(spec) is not None}


@jax.named_scope("muon")
def _orthogonalized(momentum: Params, weights: Weights, steps: int, *, over_data: bool) -> Params:
  dtype = "float32" if topology.devices()[0].platform == "cpu" else "bfloat16"
  found = orthogonalized(momentum, weights, steps=steps, dtype=dtype, over_data=over_data)
  return {name: x.astype(jnp.float32) for name, x in found.items()}


def _factor(how: Matrix, scale: Scale) -> float:
  if scale == "rms":
    return 0.2 * math.sqrt(max(how.num_inputs, how.num_outputs))
  return math.sqrt(max(1, how.num_outputs / how.num_inputs))
