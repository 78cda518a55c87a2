# SPDX-License-Identifier: Apache-2.0
"""The temperature of attention at long positions."""

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable


@configurable
def long_context_scale(
  positions_BT: jax.Array,
  *,
  floor: ranges.Size,
  strength: ranges.Finite,
  first: ranges.NonNegative = 0,
) -> jax.Array:
  """Returns the factors of queries that keep attention sharp at long positions, float32 [B, T].

  1 + strength * log(1 + floor((position + first) / floor)), which is 1 at early positions
  (Nakanishi, 2025, arXiv:2501.19399). Llama 4 counts positions from `first` = 1, Ministral 3 from
  0. Negative positions, which are padding, count as 0.
  """
  numbers_BT = jnp.maximum(positions_BT, 0).astype(jnp.float32) + first
  return 1 + strength * jnp.log1p(jnp.floor(numbers_BT / floor))
