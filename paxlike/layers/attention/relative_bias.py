# SPDX-License-Identifier: Apache-2.0
"""A learned attention bias per head and bucket of distances (T5; Raffel et al., 2020)."""

import math

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import ArgumentError
from paxlike.layers import module


@configurable
class RelativeBias(module.Module):
  """A bias for each head and bucket of distances.

  Each distance below num_buckets / 2 has a bucket of its own; larger ones share logarithmic
  buckets, up to max_distance.
  """

  def __init__(
    self,
    num_heads: ranges.Size,
    *,
    num_buckets: ranges.Buckets = 32,
    max_distance: ranges.Size = 128,
    init: module.Initializer = module.zeros,
  ):
    """All distances of at least `max_distance` share the last bucket."""
    if max_distance <= num_buckets // 2:
      raise ArgumentError(
        f"{max_distance=} must be more than half of {num_buckets=}: the first half of the buckets"
        " holds one distance each."
      )
    self.num_buckets = num_buckets
    self.max_distance = max_distance
    self.table = self.weight({"heads": num_heads, "position": num_buckets}, init=init)

  def __call__(self, distances: jax.Array) -> jax.Array:
    """Returns [N, ...] for distances [...] to earlier tokens; negative distances count as 0."""
    distances = jnp.maximum(distances, 0)
    exact = self.num_buckets // 2
    # Coarse buckets divide the range from log(exact) to log(max_distance) evenly.
    share = jnp.log(jnp.maximum(distances, 1) / exact) / math.log(self.max_distance / exact)
    coarse = exact + (share * (self.num_buckets - exact)).astype(jnp.int32)
    buckets = jnp.where(distances < exact, distances, jnp.minimum(coarse, self.num_buckets - 1))
    return self.table[...][:, buckets]
