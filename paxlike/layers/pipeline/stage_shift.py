# SPDX-License-Identifier: Apache-2.0
"""Collectives between pipeline stages, and dynamic indexing of pytrees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AXIS = "pipeline"


def on_stages(function: Callable[..., Any], **specs: Any) -> Callable[..., Any]:
  """Returns `shard_map` of a function over the stages; other axes are left to the compiler."""
  return jax.shard_map(function, axis_names={AXIS}, check_vma=False, **specs)


def zeros(like: Any) -> Any:
  """Returns a pytree of zeros with the shapes and dtypes of `like`."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def where(condition: jax.Array, tree: Any) -> Any:
  """Returns the pytree if `condition` is true, else zeros."""
  return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def take(tree: Any, index: jax.Array | int) -> Any:
  """Returns the entry at `index` in the leading dim of a pytree."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def put(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the array with `value` at `index`; unchanged if the index is negative."""
  at = jnp.maximum(index, 0)
  value = jnp.where(index >= 0, value, take(array, at))
  return jax.lax.dynamic_update_index_in_dim(array, value, at, 0)


def by_chunk(stacked: jax.Array, chunks: int) -> jax.Array:
  """Returns [layers, ...] as [chunks, layers / chunks, ...]."""
  return stacked.reshape(chunks, -1, *stacked.shape[1:])


def after(tree: Any, sent: jax.Array, microbatch: jax.Array) -> Any:
  """On CPUs, returns the pytree with a data dependence on `sent`; elsewhere unchanged.

  XLA for CPUs runs independent loops concurrently and can match a collective of one loop with that
  of another, because JAX gives all collectives within `shard_map` the same channel.
  """

  def wait(tree: Any) -> Any:
    # Always false, but the compiler cannot prove it.
    is_never = (microbatch < -1) & (sent.ravel()[0] > 0)
    return where(~is_never, tree)

  return jax.lax.platform_dependent(tree, cpu=wait, default=lambda tree: tree)


def upwards(x: jax.Array, num_stages: int) -> jax.Array:
  """Sends x to the next stage (the last to the first); returns the x of the previous stage."""
  return jax.lax.ppermute(x, AXIS, [(s, (s + 1) % num_stages) for s in range(num_stages)])


def downwards(x: jax.Array, num_stages: int) -> jax.Array:
  """Sends x to the previous stage (the first to the last); returns the x of the next stage."""
  return jax.lax.ppermute(x, AXIS, [(s, (s - 1) % num_stages) for s in range(num_stages)])
