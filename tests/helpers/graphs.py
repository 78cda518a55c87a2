# SPDX-License-Identifier: Apache-2.0
"""A graph of paxlike's layers and of optax, to save and load."""

import copy

import fiddle as fdl
import jax.numpy as jnp
import optax

from paxlike import layers
from paxlike.layers import stack


def transformer() -> fdl.Buildable:
  """Returns a stack of blocks, and an optimizer with a schedule."""
  linear = fdl.Partial(layers.Linear, dtype=jnp.bfloat16)
  attention = fdl.Partial(
    layers.Attention,
    num_heads=4,
    head_dim=8,
    **{name: copy.copy(linear) for name in ("query", "key", "value", "output")},
  )
  block = fdl.Partial(layers.Block, norm=fdl.Partial(layers.RmsNorm), attention=attention)
  schedule = fdl.Config(optax.cosine_decay_schedule, init_value=6e-4, decay_steps=10)
  return fdl.Config(
    dict,
    stack=fdl.Partial(
      layers.Stack, pattern=[block], repeats=2, scan=True, remat=stack.Remat.SAVE_NOTHING
    ),
    optimizer=fdl.Config(
      optax.chain,
      fdl.Config(optax.clip_by_global_norm, 1.0),
      fdl.Config(optax.adamw, learning_rate=schedule, b2=0.95),
    ),
  )
