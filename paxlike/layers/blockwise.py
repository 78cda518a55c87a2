# SPDX-License-Identifier: Apache-2.0
"""Attention as a list of blocks: some of the queries to some of the keys, in any order.

Partial results are combined by running maxima and sums (Milakov and Gimelshein, arXiv:1805.02867);
the way back computes the logits again (Dao, arXiv:2307.08691). Beyond the legend of letters, there
are P pieces of T queries each, I blocks, and G = N / K heads that share keys. Statistics and sums
are float32, products in the dtype of the inputs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.layers.ring import take

_HIDDEN = -1e30


class Mask(NamedTuple):
  """What becomes of logits beside the causal mask; see `Options`."""

  window: int | None
  soft_cap: float | None


class Queries(NamedTuple):
  """Pieces of queries.

  Attributes:
    q: [P, B, K, G, T, H], scaled.
    segments: int32 [P, B, T], if there are any.
    positions: int32 [P, T], in their rows.
  """

  q: jax.Array
  segments: jax.Array | None
  positions: jax.Array


class Keys(NamedTuple):
  """Keys and values.

  Attributes:
    k: [B, S, K, H].
    v: [B, S, K, H], its H another than that of k.
    segments: int32 [B, S], if there are any.
    positions: int32 [1, S], in their rows.
  """

  k: jax.Array
  v: jax.Array
  segments: jax.Array | None
  positions: jax.Array


class Share(NamedTuple):
  """What one of the devices has that share rows.

  Attributes:
    queries: Its own.
    keys: Its own, in the order of time.
    num_devices: That share the rows.
    mask: See there.
  """

  queries: Queries
  keys: Keys
  num_devices: int
  mask: Mask


@functools.partial(
  jax.tree_util.register_dataclass, data_fields=["pieces", "starts"], meta_fields=["span"]
)
@dataclasses.dataclass(frozen=True)
class Blocks:
  """Which blocks to compute.

  Attributes:
    pieces: int32 [I], of queries.
    starts: int32 [I], the first of the keys.
    span: How many keys from there on.
  """

  pieces: jax.Array
  starts: jax.Array
  span: int

  @classmethod
  def of_halves(cls, queries: Queries, halves: jax.Array, chunks: jax.Array) -> "Blocks":
    """Returns the blocks of halves of the queries and chunks, as long as those, of the keys."""
    P, *_, T, _ = queries.q.shape
    pieces = halves[:, None] * (P // 2) + jnp.arange(P // 2)
    span = P // 2 * T
    return cls(pieces.reshape(-1), jnp.repeat(chunks * span, P // 2), span)


class Partial(NamedTuple):
  """What queries have of the keys so far.

  Attributes:
    y: [P, B, K, G, T, H], sums of weighted values.
    most: [P, B, K, G, T], the largest logit.
    total: [P, B, K, G, T], sums of weights. These are relative to that of the largest logit.
  """

  y: jax.Array
  most: jax.Array
  total: jax.Array


class Back(NamedTuple):
  """What else of queries the way back needs.

  Attributes:
    dy: [P, B, K, G, T, H], the gradient by the output.
    lse: float32 [P, B, K, G, T], the logarithm of the sum of exponentials of the logits.
    delta: float32 [P, B, K, G, T], sums of dy * y.
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
  *shape, _ = queries.q.shape
  y, none = jnp.zeros((*shape, value_dim), jnp.float32), jnp.zeros(shape, jnp.float32)
  if sinks_N is None:
    return Partial(y, none + _HIDDEN, none)
  return Partial(y, none + sinks_N.reshape(*shape[2:4], 1), none + 1)


def attend(partial: Partial, queries: Queries, keys: Keys, blocks: Blocks, mask: Mask) -> Partial:
  """Returns what queries have after some more blocks; the first shows each of them a key."""

  def add(partial: Partial, block: Blocks) -> tuple[Partial, None]:
    query, key = take(queries, block.pieces), _span(keys, block)
    old = take(partial, block.pieces)
    logits, visible = _logits(query, key, mask)
    logits = jnp.where(visible, logits, _HIDDEN)
    most = jnp.maximum(old.most, logits.max(-1))
    weights, fade = jnp.exp(logits - most[..., None]), jnp.exp(old.most - most)
    y = _product("BKGTS,BSKH->BKGTH", weights.astype(key.v.dtype), key.v)
    new = Partial(old.y * fade[..., None] + y, most, old.total * fade + weights.sum(-1))
    return jax.tree.map(lambda x, part: _put(x, part, block.pieces), partial, new), None

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
    query, key = take(queries, block.pieces), _span(keys, block)
    dy, lse, delta = take(back, block.pieces)
    logits, visible = _logits(query, key, mask)
    weights = jnp.exp(jnp.where(visible, logits, _HIDDEN) - lse[..., None])
    dlogits = _product("BKGTH,BSKH->BKGTS", dy, key.v) - delta[..., None]
    dlogits *= weights
    if mask.soft_cap is not None:
      dlogits *= 1 - jnp.square(logits / mask.soft_cap)
    weights, dlogits = weights.astype(dy.dtype), dlogits.astype(query.q.dtype)
    dq = _product("BKGTS,BSKH->BKGTH", dlogits, key.k)
    dk = _product("BKGTS,BKGTH->BSKH", dlogits, query.q)
    dv = _product("BKGTS,BKGTH->BSKH", weights, dy)
    dq = _put(sums.q, take(sums.q, block.pieces) + dq, block.pieces)
    old = _span((sums.k, sums.v), block)
    dk, dv = (
      jax.lax.dynamic_update_slice_in_dim(x, before + new, block.starts, 1)
      for x, before, new in zip(sums[1:], old, (dk, dv), strict=True)
    )
    return Gradients(dq, dk, dv), None

  return jax.lax.scan(add, gradients, blocks)[0]


def _logits(query: Queries, key: Keys, mask: Mask) -> tuple[jax.Array, jax.Array]:
  """Returns (logits of a block [B, K, G, T, S], which of them are visible)."""
  logits = _product("BKGTH,BSKH->BKGTS", query.q, key.k)
  if mask.soft_cap is not None:
    logits = mask.soft_cap * jnp.tanh(logits / mask.soft_cap)
  distance_TS = query.positions[:, None] - key.positions
  visible = distance_TS >= 0
  if mask.window is not None:
    visible &= distance_TS < mask.window
  if query.segments is not None and key.segments is not None:
    same_BTS = query.segments[:, :, None] == key.segments[:, None, :]
    visible = (visible & same_BTS)[:, None, None]
  return logits, visible


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _span(tree: Any, block: Blocks) -> Any:
  """Returns the keys of a block, or what is shaped as they are."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, block.starts, block.span, 1), tree)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)
