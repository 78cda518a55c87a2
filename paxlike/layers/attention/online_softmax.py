# SPDX-License-Identifier: Apache-2.0
"""Blockwise attention: an online softmax over blocks of queries and keys, in any order.

Blocks are combined by running maxima and sums (Milakov and Gimelshein, arXiv:1805.02867); the
backward pass recomputes the logits (Dao, arXiv:2307.08691). Letters: P pieces of T queries each, I
blocks, G = N / K query heads per KV head. Maxima and sums are float32; operands of matmuls have the
dtype of the inputs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.layers.pytree_indexing import take

_MASKED = -1e30


class Mask(NamedTuple):
  """Window and soft cap, applied besides the causal mask; see `AttentionOptions`."""

  window: int | None
  soft_cap: float | None


class Queries(NamedTuple):
  """Pieces of queries.

  Attributes:
    q: [P, B, K, G, T, H], scaled.
    segments: int32 [P, B, T], if there are any.
    positions: int32 [P, T], positions in the full sequence.
  """

  q: jax.Array
  segments: jax.Array | None
  positions: jax.Array


class Keys(NamedTuple):
  """Keys and values.

  Attributes:
    k: [B, S, K, H].
    v: [B, S, K, H]; H may differ from that of k.
    segments: int32 [B, S], if there are any.
    positions: int32 [1, S], positions in the full sequence.
  """

  k: jax.Array
  v: jax.Array
  segments: jax.Array | None
  positions: jax.Array


class Shard(NamedTuple):
  """A device's shard of the sequences.

  Attributes:
    queries: Its queries.
    keys: Its keys and values, in sequence order.
    num_devices: C, the number of shards of a sequence.
    mask: Window and soft cap.
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
  """The blocks to compute.

  Attributes:
    pieces: int32 [I], the index of each block's piece of queries.
    starts: int32 [I], the first key of each block.
    span: The number of keys of a block.
  """

  pieces: jax.Array
  starts: jax.Array
  span: int

  @classmethod
  def of_halves(cls, queries: Queries, halves: jax.Array, chunks: jax.Array) -> "Blocks":
    """Returns the blocks of pairs of a half of the queries and an equally long chunk of the keys.

    For each pair, `halves` holds 0 (first half) or 1, and `chunks` the index of the chunk.
    """
    P, *_, T, _ = queries.q.shape
    pieces = halves[:, None] * (P // 2) + jnp.arange(P // 2)
    span = P // 2 * T
    return cls(pieces.reshape(-1), jnp.repeat(chunks * span, P // 2), span)


class Accumulator(NamedTuple):
  """The online-softmax accumulator over the keys so far; float32.

  Attributes:
    y: [P, B, K, G, T, H], unnormalized sums of weighted values.
    maximum: [P, B, K, G, T], the running maximum of the logits.
    total: [P, B, K, G, T], the running sum of exp(logit - maximum).
  """

  y: jax.Array
  maximum: jax.Array
  total: jax.Array


class BackwardInputs(NamedTuple):
  """Inputs of the backward pass per query.

  Attributes:
    dy: [P, B, K, G, T, H], the cotangent of the output.
    lse: float32 [P, B, K, G, T], the logsumexp of the logits.
    delta: float32 [P, B, K, G, T], the sum over H of dy * y.
  """

  dy: jax.Array
  lse: jax.Array
  delta: jax.Array


class Gradients(NamedTuple):
  """Gradients of q, k and v, accumulated in float32."""

  q: jax.Array
  k: jax.Array
  v: jax.Array


def start(queries: Queries, value_dim: int, sinks_N: jax.Array | None) -> Accumulator:
  """Returns the initial accumulator."""
  *shape, _ = queries.q.shape
  y, none = jnp.zeros((*shape, value_dim), jnp.float32), jnp.zeros(shape, jnp.float32)
  if sinks_N is None:
    return Accumulator(y, none + _MASKED, none)
  return Accumulator(y, none + sinks_N.reshape(*shape[2:4], 1), none + 1)


def attend(
  accumulator: Accumulator, queries: Queries, keys: Keys, blocks: Blocks, mask: Mask
) -> Accumulator:
  """Returns the accumulator with `blocks` added.

  The first block of a piece must have a visible key for each query.
  """

  def add(accumulator: Accumulator, block: Blocks) -> tuple[Accumulator, None]:
    query, key = take(queries, block.pieces), _span(keys, block)
    old = take(accumulator, block.pieces)
    logits, visible = _logits(query, key, mask)
    logits = jnp.where(visible, logits, _MASKED)
    maximum = jnp.maximum(old.maximum, logits.max(-1))
    weights, rescale = jnp.exp(logits - maximum[..., None]), jnp.exp(old.maximum - maximum)
    y = _einsum("BKGTS,BSKH->BKGTH", weights.astype(key.v.dtype), key.v)
    new = Accumulator(
      old.y * rescale[..., None] + y, maximum, old.total * rescale + weights.sum(-1)
    )
    return jax.tree.map(lambda x, value: _put(x, value, block.pieces), accumulator, new), None

  return jax.lax.scan(add, accumulator, blocks)[0]


def finish(accumulator: Accumulator) -> tuple[jax.Array, jax.Array]:
  """Returns (attention, the logsumexp of the logits), float32."""
  return accumulator.y / accumulator.total[..., None], accumulator.maximum + jnp.log(
    accumulator.total
  )


def zero_gradients(queries: Queries, keys: Keys) -> Gradients:
  """Returns float32 zeros of the shapes of q, k and v."""
  return Gradients(*(jnp.zeros(x.shape, jnp.float32) for x in (queries.q, keys.k, keys.v)))


def attend_backward(
  gradients: Gradients,
  queries: Queries,
  keys: Keys,
  inputs: BackwardInputs,
  blocks: Blocks,
  mask: Mask,
) -> Gradients:
  """Returns `gradients` with those of `blocks` added."""

  def add(sums: Gradients, block: Blocks) -> tuple[Gradients, None]:
    query, key = take(queries, block.pieces), _span(keys, block)
    dy, lse, delta = take(inputs, block.pieces)
    logits, visible = _logits(query, key, mask)
    weights = jnp.exp(jnp.where(visible, logits, _MASKED) - lse[..., None])
    dlogits = _einsum("BKGTH,BSKH->BKGTS", dy, key.v) - delta[..., None]
    dlogits *= weights
    if mask.soft_cap is not None:
      dlogits *= 1 - jnp.square(logits / mask.soft_cap)
    weights, dlogits = weights.astype(dy.dtype), dlogits.astype(query.q.dtype)
    dq = _einsum("BKGTS,BSKH->BKGTH", dlogits, key.k)
    dk = _einsum("BKGTS,BKGTH->BSKH", dlogits, query.q)
    dv = _einsum("BKGTS,BKGTH->BSKH", weights, dy)
    dq = _put(sums.q, take(sums.q, block.pieces) + dq, block.pieces)
    old = _span((sums.k, sums.v), block)
    dk, dv = (
      jax.lax.dynamic_update_slice_in_dim(x, before + new, block.starts, 1)
      for x, before, new in zip(sums[1:], old, (dk, dv), strict=True)
    )
    return Gradients(dq, dk, dv), None

  return jax.lax.scan(add, gradients, blocks)[0]


def _logits(query: Queries, key: Keys, mask: Mask) -> tuple[jax.Array, jax.Array]:
  """Returns (logits of a block [B, K, G, T, S], a mask that is true where they are visible)."""
  logits = _einsum("BKGTH,BSKH->BKGTS", query.q, key.k)
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


def _einsum(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _span(tree: Any, block: Blocks) -> Any:
  """Returns the slice of a pytree of [B, S, ...] that a block covers."""
  return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, block.starts, block.span, 1), tree)


def _put(x: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(x, value, index, 0)
