# SPDX-License-Identifier: Apache-2.0
"""Attention as a list of blocks: some of the queries to some of the keys, in any order.

Partial results are combined by running maxima and sums (Milakov and Gimelshein, 2018); the way back
computes the logits again (Dao, arXiv:2307.08691). Letters beyond the legend: P pieces of queries, M
chunks of keys, G = N / K heads that share keys, I blocks; T and S are of one piece and one chunk.
Statistics and sums are float32, products in the dtype of the inputs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from paxlike.layers.ring import take

_HIDDEN = -1e30


class Mask(NamedTuple):
  """What becomes of logits, but for the causal mask; see `Options`."""

  window: int | None
  soft_cap: float | None


class Queries(NamedTuple):
  """Pieces of queries.

  Attributes:
    q: [P, B, K, G, T, H], scaled.
    segments: [P, B, T], if there are any.
    first: [P], where a piece begins in its row.
  """

  q: jax.Array
  segments: jax.Array | None
  first: jax.Array


class Keys(NamedTuple):
  """Chunks of keys.

  Attributes:
    k: [M, B, S, K, H].
    v: [M, B, S, K, H].
    segments: [M, B, S], if there are any.
    first: [M], where a chunk begins in its row.
  """

  k: jax.Array
  v: jax.Array
  segments: jax.Array | None
  first: jax.Array


class Blocks(NamedTuple):
  """Which blocks to compute: int32 [I] each."""

  pieces: jax.Array
  chunks: jax.Array

  @classmethod
  def of(cls, queries: Queries, halves: jax.Array, chunks: jax.Array) -> "Blocks":
    """Returns the blocks of all pieces of a half of the queries and a chunk of keys, for each."""
    count = len(queries.q) // 2
    pieces = halves[:, None] * count + jnp.arange(count)
    return cls(pieces.reshape(-1), jnp.repeat(chunks, count))


class Partial(NamedTuple):
  """What queries have of the keys so far.

  Attributes:
    y: [P, B, K, G, T, H], sums of weighted values.
    most: [P, B, K, G, T], the largest logit.
    total: [P, B, K, G, T], sums of weights relative to that.
  """

  y: jax.Array
  most: jax.Array
  total: jax.Array


class Back(NamedTuple):
  """What the way back needs of queries: the gradient of y, and of float32 [P, B, K, G, T] each.

  Attributes:
    dy: [P, B, K, G, T, H].
    lse: The logarithm of the sum of exponentials of all logits.
    delta: Sums of dy * y.
  """

  dy: jax.Array
  lse: jax.Array
  delta: jax.Array


class Gradients(NamedTuple):
  """Sums in float32, shaped as what they are of."""

  q: jax.Array
  k: jax.Array
  v: jax.Array


def start(queries: Queries, value_dim: int, sinks_N: jax.Array | None) -> Partial:
  """Returns what queries have before any key."""
  _, _, K, G, _, _ = queries.q.shape
  shape = queries.q.shape[:-1]
  y, none = jnp.zeros((*shape, value_dim), jnp.float32), jnp.zeros(shape, jnp.float32)
  if sinks_N is None:
    return Partial(y, none + _HIDDEN, none)
  return Partial(y, none + sinks_N.reshape(K, G, 1), none + 1)


def attend(partial: Partial, queries: Queries, keys: Keys, blocks: Blocks, mask: Mask) -> Partial:
  """Returns what queries have after some more blocks.

  Of a piece without sinks, the first block must show each query a key.
  """

  def add(partial: Partial, block: Blocks) -> tuple[Partial, None]:
    query, key, old = (
      take(queries, block.pieces),
      take(keys, block.chunks),
      take(partial, block.pieces),
    )
    logits, visible = _logits(query, key, mask)
    logits = jnp.where(visible, logits, _HIDDEN)
    most = jnp.maximum(old.most, logits.max(-1))
    weights = jnp.exp(logits - most[..., None])
    fade = jnp.exp(old.most - most)
    y = _product("BKGTS,BSKH->BKGTH", weights.astype(key.v.dtype), key.v)
    new = Partial(old.y * fade[..., None] + y, most, old.total * fade + weights.sum(-1))
    return jax.tree.map(lambda all, one: _put(all, one, block.pieces), partial, new), None

  return jax.lax.scan(add, partial, blocks)[0]


def finish(partial: Partial) -> tuple[jax.Array, jax.Array]:
  """Returns (attention, the logarithm of the sum of exponentials), float32."""
  return partial.y / partial.total[..., None], partial.most + jnp.log(partial.total)


def no_gradients(queries: Queries, keys: Keys) -> Gradients:
  """Returns the sums before any block."""
  return Gradients(*(jnp.zeros(x.shape, jnp.float32) for x in (queries.q, keys.k, keys.v)))


def attend_back(
  gradients: Gradients, queries: Queries, keys: Keys, back: Back, blocks: Blocks, mask: Mask
) -> Gradients:
  """Returns the sums after some more blocks."""

  def add(sums: Gradients, block: Blocks) -> tuple[Gradients, None]:
    piece, chunk = block
    query, key, of_y = take(queries, piece), take(keys, chunk), take(back, piece)
    logits, visible = _logits(query, key, mask)
    weights = jnp.exp(jnp.where(visible, logits, _HIDDEN) - of_y.lse[..., None])
    dweights = _product("BKGTH,BSKH->BKGTS", of_y.dy, key.v)
    dlogits = weights * (dweights - of_y.delta[..., None])
    if mask.soft_cap is not None:
      dlogits *= 1 - jnp.square(logits / mask.soft_cap)
    weights, dlogits = weights.astype(of_y.dy.dtype), dlogits.astype(query.q.dtype)
    dq = _product("BKGTS,BSKH->BKGTH", dlogits, key.k)
    dk = _product("BKGTS,BKGTH->BSKH", dlogits, query.q)
    dv = _product("BKGTS,BKGTH->BSKH", weights, of_y.dy)
    new = (
      _add(x, dx, at) for x, dx, at in zip(sums, (dq, dk, dv), (piece, chunk, chunk), strict=True)
    )
    return Gradients(*new), None

  return jax.lax.scan(add, gradients, blocks)[0]


def _logits(query: Queries, key: Keys, mask: Mask) -> tuple[jax.Array, jax.Array]:
  """Returns (logits of one block [B, K, G, T, S], which of them are visible)."""
  logits = _product("BKGTH,BSKH->BKGTS", query.q, key.k)
  if mask.soft_cap is not None:
    logits = mask.soft_cap * jnp.tanh(logits / mask.soft_cap)
  T, S = logits.shape[-2:]
  distance_TS = (query.first + jnp.arange(T))[:, None] - (key.first + jnp.arange(S))
  visible = distance_TS >= 0
  if mask.window is not None:
    visible &= distance_TS < mask.window
  if query.segments is not None and key.segments is not None:
    same_BTS = query.segments[:, :, None] == key.segments[:, None, :]
    visible = (visible & same_BTS)[:, None, None]
  return logits, visible


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)


def _add(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
  return _put(x, take(x, index) + part, index)
