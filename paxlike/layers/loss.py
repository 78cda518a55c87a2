# SPDX-License-Identifier: Apache-2.0
"""Losses over a vocabulary, in float32 whatever the logits are."""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns -log softmax(logits)[targets] in nats, float32 [...], for logits [..., V]."""
  return _forward(logits, targets)[0]


def _forward(logits, targets):
  logits32 = logits.astype(jnp.float32)
  normalizer = jax.nn.logsumexp(logits32, axis=-1)
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return normalizer - chosen.astype(jnp.float32), (logits, targets, normalizer)


def _backward(residuals, gradient):
  # By hand, so that the gradient is one elementwise pass and no scatter.
  logits, targets, normalizer = residuals
  probabilities = jnp.exp(logits.astype(jnp.float32) - normalizer[..., None])
  chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
  return ((probabilities - chosen) * gradient[..., None]).astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)
