# SPDX-License-Identifier: Apache-2.0
"""Collectives between pipeline stages."""

from collections.abc import Callable
from typing import Any

import jax

from paxlike.layers import pytree_indexing

AXIS = "pipeline"


def on_stages(function: Callable[..., Any], **specs: Any) -> Callable[..., Any]:
  """Returns `shard_map` of a function over the stages; other axes are left to the compiler."""
  return jax.shard_map(function, axis_names={AXIS}, check_vma=False, **specs)


def depend_on(tree: Any, sent: jax.Array, microbatch: jax.Array) -> Any:
  """On CPUs, returns the pytree with a data dependence on `sent`; elsewhere unchanged.

  XLA for CPUs runs independent loops concurrently and can match a collective of one loop with that
  of another, because JAX gives all collectives within `shard_map` the same channel.
  """

  def wait(tree: Any) -> Any:
    # Always false, but the compiler cannot prove it.
    is_never = (microbatch < -1) & (sent.ravel()[0] > 0)
    return pytree_indexing.where(~is_never, tree)

  return jax.lax.platform_dependent(tree, cpu=wait, default=lambda tree: tree)


def upwards(x: jax.Array, num_stages: int) -> jax.Array:
  """Sends x to the next stage (the last to the first); returns the x of the previous stage."""
  return jax.lax.ppermute(x, AXIS, [(s, (s + 1) % num_stages) for s in range(num_stages)])


def downwards(x: jax.Array, num_stages: int) -> jax.Array:
  """Sends x to the previous stage (the first to the last); returns the x of the next stage."""
  return jax.lax.ppermute(x, AXIS, [(s, (s - 1) % num_stages) for s in range(num_stages)])
