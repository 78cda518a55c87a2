# SPDX-License-Identifier: Apache-2.0
"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-AI, 2025, arXiv:2512.02556).

It gives a score to each token that a query may attend to; the query then attends only to the tokens
with the highest scores. I is the number of the indexer's heads, K that of the selected tokens:

    score_ts = sum over heads i of weight_ti * ReLU(q_ti . k_s)
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import module
from paxlike.layers.attention.chunked import over_queries
from paxlike.layers.attention.rope import Rope
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear

_MOST_SCORES = 2**26  # Of heads, queries and keys, per device, that are materialized at a time.


class IndexQueries(NamedTuple):
  """The queries of the indexer's heads, and the weights of heads: float32, scaled."""

  q_BTIH: jax.Array
  weights_BTI: jax.Array


@configurable
class Indexer(module.Module):
  """Scores pairs of tokens by small heads that share one key."""

  def __init__(
    self,
    dim: ranges.Size,
    query_rank: ranges.Size,
    rope_dim: ranges.Size,
    *,
    num_heads: ranges.Size,
    head_dim: ranges.Size,
    top_k: ranges.Size,
    query: Callable[..., Linear],
    key: Callable[..., Linear],
    weights: Callable[..., Linear],
    norm: Callable[..., Any],
    rope: Callable[[int], Rope],
  ):
    """Builds the layer.

    Args:
      dim: D.
      query_rank: Width of the latent vectors of queries.
      rope_dim: Rotary dims of a head, the first ones.
      num_heads: I.
      head_dim: H.
      top_k: K.
      query: query_rank -> I x H.
      key: D -> H.
      weights: D -> I, in float32.
      norm: Applied to keys.
      rope: Applied to the rotary dims of queries and keys.
    """
    if head_dim < rope_dim:
      raise ArgumentError(
        f"{head_dim=} must be at least {rope_dim=}: the first dims of an indexer's head are rotary."
      )
    self.num_heads = num_heads
    self.head_dim = head_dim
    self.rope_dim = rope_dim
    self.top_k = top_k
    self.query = query({"rank": query_rank}, {"heads": num_heads, "head": head_dim})
    self.key = key({"model": dim}, {"head": head_dim})
    self.key_norm = norm(head_dim, over="head")
    self.weights = weights({"model": dim}, {"heads": num_heads})
    self.rope = rope(rope_dim)

  def queries(self, x_BTD: jax.Array, latent_BTC: jax.Array, context: Context) -> IndexQueries:
    """Returns the queries, projected from the latent vectors of the attention's queries."""
    q_BTIH = self._rotated(self.query(latent_BTC, context), context)
    weights_BTI = self.weights(x_BTD, context).astype(jnp.float32)
    return IndexQueries(q_BTIH, weights_BTI / math.sqrt(self.num_heads * self.head_dim))

  def keys(self, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns k_BTH."""
    k_BTH = self.key_norm(self.key(x_BTD, context))
    return self._rotated(k_BTH[:, :, None], context)[:, :, 0]

  def _rotated(self, x_BTIH: jax.Array, context: Context) -> jax.Array:
    rotary, others = jnp.split(x_BTIH, [self.rope_dim], axis=-1)
    return jnp.concatenate([self.rope(rotary, context.positions_BT), others], axis=-1)

  def select(
    self, queries: IndexQueries, k_BSH: jax.Array, segments_BT: jax.Array | None
  ) -> jax.Array:
    """Returns int32 [B, T, K]: the places in the sequence of the tokens selected for each query.

    They are among the tokens of its segment that are not after it. K is `top_k`, or S if that is
    less; places beyond the number of these tokens are -1. Of tokens with equal scores, the first
    are selected. There is no gradient.

    Scores are computed a chunk of queries at a time, and the queries of a sequence are sharded over
    the axis `tensor`, too.
    """
    queries, k_BSH = jax.lax.stop_gradient((queries, k_BSH))
    given = _Given(*queries, k_BSH, segments_BT, segments_BT)
    if not (sizes := mesh.sizes_here(mesh.AXES)):
      return _select(given, self.top_k)
    specs = _Given(
      *(
        None if x is None else mesh.partition(dims, x.shape, sizes)
        for dims, x in zip(_DIMS, given, strict=True)
      )
    )
    axes = mesh.axes_by_dim(specs.weights_BTI)[1]

    def local(given: _Given) -> jax.Array:
      if not axes:
        return _select(given, self.top_k)
      return _select(given, self.top_k, jax.lax.axis_index(axes) * given.q_BTIH.shape[1])

    places_BTK = mesh.on_each_device(local, (specs,), specs.weights_BTI)(given)
    return mesh.constrain(places_BTK, "batch", "time", None)

  def select_cached(
    self, queries: IndexQueries, k_BHS: jax.Array, visible_BS: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (the slots [B, K] selected for one query per sequence, whether each is visible)."""
    logits_BTIS = jnp.einsum(
      "BTIH,BHS->BTIS", queries.q_BTIH, k_BHS, preferred_element_type=jnp.float32
    )
    scores_BS = weighted(logits_BTIS, queries.weights_BTI)[:, 0]
    values, slots = jax.lax.top_k(jnp.where(visible_BS, scores_BS, -jnp.inf), self.top_k)
    return slots, values != -jnp.inf


class _Given(NamedTuple):
  """The inputs of a selection, or their PartitionSpecs."""

  q_BTIH: Any
  weights_BTI: Any
  k_BSH: Any
  segments_BT: Any
  segments_BS: Any


_DIMS = _Given(
  ("batch", "sequence", None, None),
  ("batch", "sequence", None),
  ("batch", None, None),
  ("batch", "sequence"),
  ("batch", None),
)


def weighted(logits_BTIS: jax.Array, weights_BTI: jax.Array) -> jax.Array:
  """Returns the scores [B, T, S], given the dot products of queries and keys; float32."""
  return (jax.nn.relu(logits_BTIS) * weights_BTI[..., None]).sum(2)


def _select(given: _Given, top_k: int, first: jax.Array | None = None) -> jax.Array:
  """Returns `Indexer.select`; the queries are those from `first` on, or all of the sequence."""
  B, T, num_heads, _ = given.q_BTIH.shape
  S = given.k_BSH.shape[1]

  def chunk(start: jax.Array, size: int, span: tuple[int, int]) -> jax.Array:
    def of(x_BT: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x_BT, start, size, 1)

    queries, end = jnp.arange(size) + start, span[1]
    if first is not None:
      queries, end = queries + first, S
    visible_BTS = jnp.broadcast_to(queries[:, None] >= jnp.arange(end), (B, size, end))
    if given.segments_BT is not None:
      visible_BTS &= of(given.segments_BT)[..., None] == given.segments_BS[:, None, :end]
    if end <= top_k:
      places = jnp.where(visible_BTS, jnp.arange(end), -1)
      return jnp.pad(places, ((0, 0), (0, 0), (0, min(top_k, S) - end)), constant_values=-1)
    logits_BTIS = jnp.einsum(
      "BTIH,BSH->BTIS",
      of(given.q_BTIH),
      given.k_BSH[:, :end],
      preferred_element_type=jnp.float32,
    )
    scores_BTS = weighted(logits_BTIS, of(given.weights_BTI))
    values, places = jax.lax.top_k(jnp.where(visible_BTS, scores_BTS, -jnp.inf), top_k)
    return jnp.where(values != -jnp.inf, places, -1)

  most = min(256, max(1, _MOST_SCORES // (B * num_heads * S)))
  return over_queries(chunk, T, most=most, num_spans=8 if first is None else 1)
