# SPDX-License-Identifier: Apache-2.0
"""State space duality: the recurrence of Mamba-2 as matmuls (Dao and Gu, 2024, arXiv:2405.21060).

Each head has a state [H, S], where S is the width of keys and queries, which the R heads of a group
G share. The state is zero before the first token of a document; then, at each token t,

    state = exp(decay_t) * state + outer(value_t, key_t)
    y_t = state @ query_t

A token reads the earlier tokens of its chunk (U) as in attention, and those before the chunk by
their state. Sums, decays and states are float32; operands of matmuls have the dtype of the values.
"""

import functools
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from paxlike.layers.recurrent import chunk_scan, shards

# Sums of multiples of 1 / 1024 are exact in float32 below 2^14.
_STEPS = 1024.0


class _Chunks(NamedTuple):
  """A device's tokens in J chunks, and which of them share a document."""

  values_JBTGRH: jax.Array
  keys_JBTGS: jax.Array
  queries_JBTGS: jax.Array
  masks: chunk_scan.Masks


class _Sums(NamedTuple):
  """Sums of the logarithms of decays from the first token of a chunk on, in two parts.

  Since the sums of the rounded logarithms are exact, a difference of two sums is as accurate as a
  sum that starts between them, however much decays before.
  """

  rounded_JBGRT: jax.Array
  rest_JBGRT: jax.Array

  @classmethod
  def of(cls, decays_JBTGR: jax.Array) -> Self:
    decays_JBGRT = jnp.moveaxis(decays_JBTGR, 2, -1)
    rounded = jnp.round(decays_JBGRT * _STEPS) / _STEPS
    return cls(jnp.cumsum(rounded, -1), jnp.cumsum(decays_JBGRT - rounded, -1))

  def within(self) -> jax.Array:
    """Returns [J, B, G, R, T, U], the logarithm of the decay from token U to token T."""
    rounded, rest = (x[..., :, None] - x[..., None, :] for x in self)
    return rounded + rest

  def to_end(self) -> jax.Array:
    """Returns [J, B, G, R, T], the logarithm of the decay from token T to the last one."""
    rounded, rest = (x[..., -1:] - x for x in self)
    return rounded + rest

  def from_start(self) -> jax.Array:
    """Returns [J, B, G, R, T], the logarithm of the decay from before the chunk to token T."""
    return self.rounded_JBGRT + self.rest_JBGRT


def chunked(
  values_BTNH: jax.Array,
  decays_BTN: jax.Array,
  keys_BTGS: jax.Array,
  queries_BTGS: jax.Array,
  segments_BT: jax.Array,
  *,
  chunk: int,
  num_devices: int,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTNH, the last state [B, N, H, S]), both float32, of a device's tokens.

  For use inside `shards.on_shards`; the last state is that of the last device.
  """
  B, num_tokens, N, H = values_BTNH.shape
  G, S = keys_BTGS.shape[2:]
  chunk = chunk_scan.size(chunk, num_tokens)
  split = functools.partial(chunk_scan.split, chunk=chunk)
  chunks = _Chunks(
    split(values_BTNH.reshape(B, num_tokens, G, N // G, H)),
    split(keys_BTGS),
    split(queries_BTGS),
    chunk_scan.masks(segments_BT, chunk, num_devices),
  )
  decays_JBTGR = split(decays_BTN.astype(jnp.float32).reshape(B, num_tokens, G, N // G))
  transitions, updates = jax.checkpoint(_changes)(chunks, decays_JBTGR)
  first = jnp.zeros(updates.shape[1:], jnp.float32)
  before, last = chunk_scan.states(transitions, updates, first, num_devices=num_devices)
  # The backward pass recomputes the decays between tokens, which take more memory than the rest.
  y_JBTGRH = jax.checkpoint(_outputs)(chunks, decays_JBTGR, before)
  y_BTNH = chunk_scan.join(y_JBTGRH, num_tokens).reshape(B, num_tokens, N, H)
  return y_BTNH, shards.of_last(last, num_devices).reshape(B, N, H, S)


def _changes(chunks: _Chunks, decays_JBTGR: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns each chunk's (transition [J, B, G, R], update [J, B, G, R, H, S]) of the state."""
  sums, masks = _Sums.of(decays_JBTGR), chunks.masks
  decays_JBGRT = _exp(sums.to_end(), masks.to_state_JBT[:, :, None, None])
  values = (chunks.values_JBTGRH * jnp.moveaxis(decays_JBGRT, -1, 2)[..., None]).astype(
    chunks.values_JBTGRH.dtype
  )
  update = _einsum("JBTGRH,JBTGS->JBGRHS", values, chunks.keys_JBTGS)
  return _exp(sums.from_start()[..., -1], masks.kept_JB[:, :, None, None]), update


def _outputs(chunks: _Chunks, decays_JBTGR: jax.Array, states_JBGRHS: jax.Array) -> jax.Array:
  """Returns y_JBTGRH, given the states before the chunks."""
  sums, masks, dtype = _Sums.of(decays_JBTGR), chunks.masks, chunks.values_JBTGRH.dtype
  is_seen_JBTU = masks.within_JBTS & jnp.tri(masks.within_JBTS.shape[-1], dtype=bool)
  scores_JBGTU = _einsum("JBTGS,JBUGS->JBGTU", chunks.queries_JBTGS, chunks.keys_JBTGS)
  decays_JBGRTU = _exp(sums.within(), is_seen_JBTU[:, :, None, None])
  weights = (scores_JBGTU[:, :, :, None] * decays_JBGRTU).astype(dtype)
  y_JBTGRH = _einsum("JBGRTU,JBUGRH->JBTGRH", weights, chunks.values_JBTGRH)
  read = _einsum("JBTGS,JBGRHS->JBTGRH", chunks.queries_JBTGS, states_JBGRHS.astype(dtype))
  decays_JBGRT = _exp(sums.from_start(), masks.from_state_JBT[:, :, None, None])
  return y_JBTGRH + read * jnp.moveaxis(decays_JBGRT, -1, 2)[..., None]


def step(
  state_BNHS: jax.Array,
  value_BNH: jax.Array,
  decay_BN: jax.Array,
  key_BGS: jax.Array,
  query_BGS: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BNH, the state after the token), both float32, for one token of each sequence."""
  B, N, H, S = state_BNHS.shape
  G = key_BGS.shape[1]
  value_BGRH = value_BNH.reshape(B, G, N // G, H)
  new = jnp.einsum("BGRH,BGS->BGRHS", value_BGRH, key_BGS, preferred_element_type=jnp.float32)
  state_BNHS = state_BNHS * jnp.exp(decay_BN)[..., None, None] + new.reshape(B, N, H, S)
  state_BGRHS = state_BNHS.reshape(B, G, N // G, H, S)
  y = jnp.einsum("BGRHS,BGS->BGRH", state_BGRHS, query_BGS.astype(jnp.float32))
  return y.reshape(B, N, H), state_BNHS


def _exp(logarithm: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns exp(logarithm) where `mask`, else 0."""
  return jnp.exp(jnp.where(mask, logarithm, -jnp.inf))


def _einsum(dims: str, *operands: jax.Array) -> jax.Array:
  return jnp.einsum(dims, *operands, preferred_element_type=jnp.float32)
