# SPDX-License-Identifier: Apache-2.0
"""Masking of pytrees, and dynamic indexing of the leading dim of pytrees and arrays."""

from typing import Any

import jax
import jax.numpy as jnp


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
