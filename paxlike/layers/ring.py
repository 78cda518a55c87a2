# SPDX-License-Identifier: Apache-2.0
"""The ring of a pipeline's stages, and arrays by indexes that a stage looks up."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AXIS = "pipeline"


def on_stages(function: Callable[..., Any], **specs: Any) -> Callable[..., Any]:
  """Returns `shard_map` of a function over the stages; other axes stay with the compiler."""
  return jax.shard_map(function, axis_names={AXIS}, check_vma=False, **specs)


def zeros(like: Any) -> Any:
  """Returns a pytree of zeros."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def only_if(condition: jax.Array, tree: Any) -> Any:
  """Returns a pytree, or zeros."""
  return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), tree)


def take(tree: Any, index: jax.Array | int) -> Any:
  """Returns an entry of the leading dim of a pytree."""
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def put(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
  """Returns the array with a value at an index, unless that is negative."""
  at = jnp.maximum(index, 0)
  value = jnp.where(index >= 0, value, take(array, at))
  return jax.lax.dynamic_update_index_in_dim(array, value, at, 0)


def by_chunk(stacked: jax.Array, chunks: int) -> jax.Array:
  """Returns [layers, ...] as [chunks, layers / chunks, ...]."""
  return stacked.reshape(chunks, -1, *stacked.shape[1:])


def after(tree: Any, sent: jax.Array, microbatch: jax.Array) -> Any:
  """Returns a pytree that is there only after `sent`, where a program is for CPUs.

  These run loops that do not need each other side by side, and take a collective of one for a like
  one of the other: JAX gives all within `shard_map` the same channel.
  """

  def wait(tree: Any) -> Any:
    # Never so, which the compiler cannot know.
    is_never = (microbatch < -1) & (sent.ravel()[0] > 0)
    return only_if(~is_never, tree)

  return jax.lax.platform_dependent(tree, cpu=wait, default=lambda tree: tree)


def upwards(x: jax.Array, num_stages: int) -> jax.Array:
  """Returns what the stage below gives; the first is above the last."""
  return jax.lax.ppermute(x, AXIS, [(s, (s + 1) % num_stages) for s in range(num_stages)])


def downwards(x: jax.Array, num_stages: int) -> jax.Array:
  """Returns what the stage above gives."""
  return jax.lax.ppermute(x, AXIS, [(s, (s - 1) % num_stages) for s in range(num_stages)])
