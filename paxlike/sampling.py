# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token from logits."""

import dataclasses

import jax
import jax.numpy as jnp

from paxlike.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Which tokens may be drawn, and how; each limit applies to what the one before left.

  Attributes:
    temperature: Divides the logits; 0 takes the likeliest token.
    top_k: Only so many of the likeliest.
    top_p: Only the likeliest that together have this probability (Holtzman et al., 2020).
    min_p: Only those with this share of the likeliest's probability (Nguyen et al., 2024).
  """

  temperature: float = 0.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None

  def __post_init__(self):
    if self.temperature < 0:
      raise UserError(f"temperature={self.temperature} must not be negative.")
    if self.top_k is not None and self.top_k < 1:
      raise UserError(f"top_k={self.top_k} must be at least 1.")
    for name in ("top_p", "min_p"):
      value = getattr(self, name)
      if value is not None and not 0 < value <= 1:
        raise UserError(f"{name}={value} must be above 0 and at most 1.")

  def draw(self, logits_BV: jax.Array, keys_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (tokens_B, their log-probabilities_B without any limit), each by a key of its own."""
    logits_BV = logits_BV.astype(jnp.float32)
    if self.temperature == 0:
      tokens_B = logits_BV.argmax(-1)
    else:
      allowed_BV = self.limit(logits_BV / self.temperature)
      tokens_B = jax.vmap(jax.random.categorical)(keys_B, allowed_BV)
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B.astype(jnp.int32), chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)

  def limit(self, logits_BV: jax.Array) -> jax.Array:
    """Returns the logits, -inf where a token may not be drawn."""
    if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
      least = jax.lax.top_k(logits_BV, self.top_k)[0][:, -1:]
      logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if self.top_p is not None:
      ordered = jnp.sort(logits_BV, axis=-1, descending=True)
      before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
      before = jnp.pad(before[:, :-1], ((0, 0), (1, 0)))
      least = jnp.where(before < self.top_p, ordered, jnp.inf).min(-1, keepdims=True)
      logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    if self.min_p is not None:
      least = logits_BV.max(-1, keepdims=True) + jnp.log(self.min_p)
      logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
    return logits_BV
