# SPDX-License-Identifier: Apache-2.0
"""The temperature of attention at long positions."""

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable


@configurable
def long_context_scale(
  positions_BT: jax.Array, *, floor: ranges.Size = 8192, strength: ranges.Finite = 0.1
) -> jax.Array:
  """Returns the factors of queries that keep attention sharp at long positions, float32 [B, T].

  1 + strength * log(1 + floor((position + 1) / floor)), which is 1 at the first `floor - 1`
  positions (Nakanishi, 2025, arXiv:2501.19399; as in Llama 4).
  """
  steps_BT = jnp.floor((positions_BT.astype(jnp.float32) + 1) / floor)
  return 1 + strength * jnp.log1p(steps_BT)
