# SPDX-License-Identifier: Apache-2.0
"""The tokens of a microbatch, sharded over the stages of a pipeline to compute its loss."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlike.layers import pytree_indexing
from paxlike.layers.pipeline import stage_shift


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageTokens:
  """Stage s of S has tokens s, s + S, ... of each sequence; T is padded with zeros.

  Attributes:
    num_stages: S.
    stage: s, of the device that computes it.
  """

  num_stages: int
  stage: jax.Array

  def of(self, x: jax.Array) -> jax.Array:
    """Returns this stage's shard [b, T / S, ...] of an array [b, T, ...] that all stages have."""
    return self._by_stage(x)[:, :, self.stage]

  def scattered(self, y: jax.Array) -> jax.Array:
    """Returns this stage's shard [b, T / S, D] of the last stage's y [b, T, D]."""
    # All stages but the last contribute zeros, so this scatters the last stage's tokens.
    own = pytree_indexing.where(self.stage == self.num_stages - 1, y)
    return jax.lax.psum_scatter(self._by_stage(own), stage_shift.AXIS, scatter_dimension=2)

  def gathered(self, shard: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of this shape, [b, T, D], from the stages' shards [b, T / S, D]."""
    by_stage = jax.lax.all_gather(shard, stage_shift.AXIS, axis=2)
    return by_stage.reshape(shape[0], -1, shape[2])[:, : shape[1]]

  def _by_stage(self, x: jax.Array) -> jax.Array:
    """Returns [b, T / S, S, ...]."""
    S = self.num_stages
    length = -(-x.shape[1] // S) * S
    x = jnp.pad(x, [(0, 0), (0, length - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(x.shape[0], length // S, S, *x.shape[2:])
