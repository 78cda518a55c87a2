# SPDX-License-Identifier: Apache-2.0
"""Sampling of the next token from logits."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from paxlike.config import knob_types, ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import UserError
from paxlike.layers.precision import cpu_dots


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Sampling options; the limits are applied in this order.

  Attributes:
    temperature: Divides the logits; 0 is greedy.
    top_k: Only the k most likely tokens.
    top_p: Only the most likely tokens with this total probability (Holtzman et al., 2020).
    min_p: Only tokens with this share of the largest probability (Nguyen et al., 2024).
  """

  temperature: ranges.Temperature = 0.0
  top_k: ranges.Size | None = None
  top_p: ranges.Share | None = None
  min_p: ranges.Share | None = None

  def __post_init__(self):
    for name, kind in typing.get_type_hints(type(self), include_extras=True).items():
      try:
        knob_types.convert(kind, value := getattr(self, name), text=False)
      except knob_types.RefusedError as refusal:
        raise UserError(f"{name}={value}: {refusal}") from None

  def draw(self, logits_BV: jax.Array, keys_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws a token for each sequence, with a key of its own.

    Returns (tokens_B, their log-probabilities_B before temperature and limits).
    """
    logits_BV = logits_BV.astype(jnp.float32)
    tokens_B = self.choose(self.tempered(logits_BV), keys_B)
    chosen_B = jnp.take_along_axis(logits_BV, tokens_B[:, None], axis=-1)[:, 0]
    return tokens_B, chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)

  def tempered(self, logits: jax.Array) -> jax.Array:
    """Returns the logits divided by the temperature; unchanged if it is 0."""
    return logits if self.temperature in (0, 1) else logits / self.temperature

  def choose(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
    """Draws int32 tokens_B from tempered float32 logits, within the limits."""
    if self.temperature == 0:
      return _likeliest(logits_BV)
    logits_BV = self.limit(logits_BV)
    masses_BV = jnp.exp(logits_BV - logits_BV.max(-1, keepdims=True))
    # First a group of ids, then one of its ids: about 2 sqrt(V) random numbers instead of V.
    masses_BGS = _grouped(masses_BV, 0)
    _, num_groups, size = masses_BGS.shape
    numbers_BN = _uniform(keys_B, num_groups + size)
    groups_B = _race(masses_BGS.sum(-1), numbers_BN[:, :num_groups])
    places_B = _race(_group(masses_BGS, groups_B), numbers_BN[:, num_groups:])
    return groups_B * size + places_B

  def limit(self, logits_BV: jax.Array) -> jax.Array:
    """Returns the logits, with -inf for tokens that may not be sampled."""
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


def _likeliest(logits_BV: jax.Array) -> jax.Array:
  """Returns the int32 ids_B of the largest logits: the first of equal ones, any if one is NaN."""
  if not cpu_dots.on_cpu() or mesh.is_sharded("vocab"):
    return logits_BV.argmax(-1).astype(jnp.int32)
  # XLA for CPUs finds an index one number at a time, but a maximum several numbers at a time.
  logits_BGS = _grouped(logits_BV, -jnp.inf)
  groups_B = logits_BGS.max(-1).argmax(-1)
  places_B = _group(logits_BGS, groups_B).argmax(-1)
  return (groups_B * logits_BGS.shape[-1] + places_B).astype(jnp.int32)


def _grouped(x_BV: jax.Array, padding: float) -> jax.Array:
  """Returns x [B, G, S]: about sqrt(V) groups of consecutive ids, the last ones padded."""
  B, V = x_BV.shape
  num_groups = 1 << (V.bit_length() // 2)
  padded = jnp.pad(x_BV, ((0, 0), (0, -V % num_groups)), constant_values=padding)
  return padded.reshape(B, num_groups, -1)


def _group(x_BGS: jax.Array, groups_B: jax.Array) -> jax.Array:
  """Returns x [B, S] of one group per sequence."""
  return jnp.take_along_axis(x_BGS, groups_B[:, None, None], axis=1)[:, 0]


def _race(masses_BN: jax.Array, numbers_BN: jax.Array) -> jax.Array:
  """Draws int32 indices_B in proportion to masses, given uniform numbers.

  Of exponential arrival times with rates p, time i is the least with probability p[i] / sum(p).
  This is the Gumbel-max trick with half as many logarithms.
  """
  return (masses_BN / -jnp.log(numbers_BN)).argmax(-1).astype(jnp.int32)


def _uniform(keys_B: jax.Array, size: int) -> jax.Array:
  """Returns float32 [B, size], uniform in (0, 1), by the hash pcg3d of a key and an index.

  Threefry, which guarantees more, costs more (Jarzynski and Olano, 2020, "Hash Functions for GPU
  Rendering").
  """
  words_B2 = jax.random.key_data(keys_B)[:, -2:]
  shape = (len(keys_B), size)
  x, y, z = (
    jnp.broadcast_to(part, shape)
    for part in (jnp.arange(size, dtype=jnp.uint32), words_B2[:, :1], words_B2[:, 1:])
  )
  x, y, z = (part * jnp.uint32(1664525) + jnp.uint32(1013904223) for part in (x, y, z))
  x += y * z
  y += z * x
  z += x * y
  x, y, z = (part ^ (part >> 16) for part in (x, y, z))
  x += y * z
  return (x >> 9).astype(jnp.float32) * 2.0**-23 + 2.0**-24
