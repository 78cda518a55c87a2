# SPDX-License-Identifier: Apache-2.0
"""Losses over a vocabulary, in float32 whatever the logits are."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike import mesh


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns -log softmax(logits)[targets] in nats, float32 [...], for logits [..., V].

  The gradient is made in one pass over the logits, in their dtype.
  """
  return _entropy_forward(logits, targets)[0]


def _entropy_forward(logits, targets):
  if mesh.is_sharded("vocab"):
    # No device has all logits of a token to choose from.
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    chosen = jnp.where(is_target, logits, jnp.zeros((), logits.dtype)).sum(-1)
  else:
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  normalizer = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
  return normalizer - chosen.astype(jnp.float32), (logits, targets, normalizer)


def _entropy_backward(saved, cotangent):
  logits, targets, normalizer = saved
  softmax = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
  # Compared, not scattered: a scatter would be a pass of its own.
  is_target = targets[..., None] == jnp.arange(logits.shape[-1])
  return ((softmax - is_target) * cotangent[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_entropy_forward, _entropy_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_over_chunks(
  loss: Callable[[Any, Any, Any], jax.Array], weights: Any, x: jax.Array, constants: Any
) -> jax.Array:
  """Returns the sum of loss(weights, x[i], constants[i]) over the leading dim.

  The gradient of each chunk is formed together with its loss, so that nothing as large as a chunk's
  logits outlives it, and no logits are computed twice.

  Args:
    loss: Returns a float32 scalar.
    weights: A pytree; differentiated.
    x: [chunks, ...]; differentiated.
    constants: A pytree of [chunks, ...].
  """

  def add(total, chunk):
    return total + loss(weights, *chunk), None

  return jax.lax.scan(add, jnp.zeros(()), (x, constants))[0]


def _chunks_forward(loss, weights, x, constants):
  def add(carry, chunk):
    total, gradient = carry
    x, constants = chunk
    value, (dw, dx) = jax.value_and_grad(loss, (0, 1))(weights, x, constants)
    gradient = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradient, dw)
    return (total + value, gradient), dx

  zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
  (total, dw), dx = jax.lax.scan(add, (jnp.zeros(()), zeros), (x, constants))
  dw = jax.tree.map(lambda g, w: g.astype(w.dtype), dw, weights)
  return total, (dw, dx)


def _chunks_backward(loss, gradients, cotangent):
  del loss
  dw, dx = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
  return dw, dx, None


sum_over_chunks.defvjp(_chunks_forward, _chunks_backward)
