# SPDX-License-Identifier: Apache-2.0
"""DeepSeek Sparse Attention (DSA; DeepSeek-V3.2, DeepSeek-AI, 2025, arXiv:2512.02556).

Latent attention of each query to the K earlier tokens that an indexer selects. C is the width of
what is cached of a token, its latent vector and its rotary key; I and K are those of `indexer.py`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jax.sharding import PartitionSpec

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.layers.attention import max_logit
from paxlike.layers.attention.cache import IndexedLatentCache, positions_in
from paxlike.layers.attention.chunked import over_queries
from paxlike.layers.attention.indexer import Indexer, IndexQueries, weighted
from paxlike.layers.attention.latent_attention import LatentAttention, Latents, Queries
from paxlike.layers.aux_losses import Aux, add, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear

_MOST_NUMBERS = 2**26  # Gathered vectors and logits, per device, that are materialized at a time.
_MASKED = -1e30


@configurable
class SparseLatentAttention(LatentAttention):
  """`LatentAttention` in which a query attends to the tokens that the indexer selects.

  In sequences of up to `indexer.top_k` tokens these are all, and the kernel computes them. Longer
  sequences are computed by plain XLA operations: a chunk of queries at a time gathers the vectors
  of the selected tokens, and never materializes their keys.

  The indexer has a loss of its own, the Kullback-Leibler divergence of the softmax of the selected
  tokens' scores from the attention to them, the mean over heads. Only this loss trains the indexer,
  and it trains nothing else. It is a mean over tokens; that of padding counts as 0.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    query_rank: ranges.Size,
    query_down: Callable[..., Linear],
    indexer: Callable[[int, int, int], Indexer],
    loss_weight: ranges.Weight = 1.0,
    **others: Any,
  ):
    """`indexer` is called with D, `query_rank` and `rope_dim`; `loss_weight` is that of its loss.

    See `LatentAttention` for the other arguments.
    """
    super().__init__(dim, query_rank=query_rank, query_down=query_down, **others)
    self.indexer = indexer(dim, query_rank, self.rope_dim)
    self.loss_weight = loss_weight

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: IndexedLatentCache | None = None
  ) -> tuple[jax.Array, IndexedLatentCache | None, Aux]:
    """Returns (y_BTD, the updated cache, losses and metrics); see `Attention`."""
    query_latent_BTC = self._query_latent(x_BTD, context)
    queries = self._queries(query_latent_BTC, context)
    latents = self._latents(x_BTD, context)
    detached = jax.lax.stop_gradient((x_BTD, query_latent_BTC))
    with jax.named_scope("indexer"):
      index_queries = self.indexer.queries(*detached, context)
      index_k_BTH = self.indexer.keys(detached[0], context)
    if cache is not None:
      assert context.positions_BT is not None
      vectors_BTC = jnp.concatenate(latents, axis=-1)
      cache = cache.write(vectors_BTC, index_k_BTH, context.positions_BT)
      if x_BTD.shape[1] == 1:
        y_BTNH = self._decoded(cache, queries, index_queries, context.positions_BT)
        return self.project(y_BTNH, x_BTD, context), cache, none()
    y_BTNH, aux = self._attend_sparsely(queries, latents, index_queries, index_k_BTH, context)
    return self.project(y_BTNH, x_BTD, context), cache, aux

  def _decoded(
    self,
    cache: IndexedLatentCache,
    queries: Queries,
    index_queries: IndexQueries,
    positions_B1: jax.Array,
  ) -> jax.Array:
    """Returns y_B1NH of one query per sequence."""
    visible_BS = positions_in(cache.num_slots, positions_B1) >= 0
    latents_BCS = cache.latents.latents_BCS
    if cache.num_slots > self.indexer.top_k:
      index_k_BHS = cache.index_keys.latents_BCS
      slots_BK, visible_BS = self.indexer.select_cached(index_queries, index_k_BHS, visible_BS)
      latents_BCS = jnp.take_along_axis(latents_BCS, slots_BK[:, None], axis=2)
    return self._attend_to(latents_BCS, visible_BS, queries)

  def _attend_sparsely(
    self,
    queries: Queries,
    latents: Latents,
    index_queries: IndexQueries,
    index_k_BTH: jax.Array,
    context: Context,
  ) -> tuple[jax.Array, Aux]:
    """Returns (the outputs of heads y_BTNH, the loss of the indexer and metrics)."""
    index = index_queries, index_k_BTH
    if index_k_BTH.shape[1] <= self.indexer.top_k:
      y_BTNH, aux = self._attend(queries, latents, context)
      if self.loss_weight:
        detached = jax.lax.stop_gradient((self._absorbed(queries)[0], latents))
        aux = add(aux, self._loss(self._found(*detached, *index, context), context))
      return y_BTNH, aux
    q_BTNC, to_value_CNH = self._absorbed(queries)
    found = self._found(q_BTNC, latents, *index, context)
    y_BTNH = jnp.einsum("BTNC,CNH->BTNH", found.y_BTNC, to_value_CNH)
    largest_N = jnp.maximum(found.largest_BTN.max((0, 1)), 0)
    if self.qk_clip is not None:
      y_BTNH = self.qk_clip.record(y_BTNH, largest_N)
    aux = max_logit.metric(largest_N) if context.log_layers else none()
    return y_BTNH, add(aux, self._loss(found, context)) if self.loss_weight else aux

  def _absorbed(self, queries: Queries) -> tuple[jax.Array, jax.Array]:
    """Returns (queries of cached vectors [B, T, N, C], the map of latents to values [C, N, H])."""
    w_CNH = self.key_value.matrix().astype(queries.q_BTNH.dtype)
    to_key_CNH, to_value_CNH = jnp.split(w_CNH, [self.head_dim], axis=-1)
    q_BTNC = jnp.einsum("BTNH,CNH->BTNC", queries.q_BTNH, to_key_CNH)
    return jnp.concatenate([q_BTNC, queries.rotary_BTNR], axis=-1), to_value_CNH

  def _found(
    self,
    q_BTNC: jax.Array,
    latents: Latents,
    index_queries: IndexQueries,
    index_k_BTH: jax.Array,
    context: Context,
  ) -> "_Found":
    with jax.named_scope("indexer"):
      places_BTK = self.indexer.select(index_queries, index_k_BTH, context.segments_BT)
    q_BTNC = (q_BTNC * self.scale).astype(q_BTNC.dtype)
    vectors_BTC = jnp.concatenate(latents, axis=-1)
    given = _Given(q_BTNC, vectors_BTC, places_BTK, *index_queries, index_k_BTH)
    with jax.named_scope("dot_product_attention"):
      return _sparse(given, rank=self.rank)

  def _loss(self, found: "_Found", context: Context) -> Aux:
    divergence_BT = found.divergence_BT
    if context.segments_BT is not None:
      divergence_BT = jnp.where(context.segments_BT > 0, divergence_BT, 0)
    return none()._replace(losses={"index_loss": self.loss_weight * divergence_BT.mean()})

  def empty_cache(self, batch: int, length: int, dtype: Any) -> IndexedLatentCache:
    """Returns an empty cache for `batch` sequences of up to `length` tokens."""
    width, index_width = self.rank + self.rope_dim, self.indexer.head_dim
    return IndexedLatentCache.empty(batch, length, width, index_width, dtype)

  def score_flops(self, num_tokens: int) -> tuple[float, float]:
    """See `Attention.score_flops`; those of the indexer are included."""
    seen = min(num_tokens, self.indexer.top_k)
    width = self.head_dim + self.rope_dim + self.value_dim
    full = 2 * seen * self.num_heads * width
    selection = self.selection_flops(num_tokens)
    return full + selection[0], full * (1 - seen / (2 * num_tokens)) + selection[1]

  def selection_flops(self, num_tokens: int) -> tuple[float, float]:
    """Returns those of the indexer's scores, which have no backward pass: (full, causal)."""
    if num_tokens <= self.indexer.top_k:
      return 0.0, 0.0
    full = 2.0 * num_tokens * self.indexer.num_heads * self.indexer.head_dim
    return full, full / 2


class _Given(NamedTuple):
  """The inputs of sparse attention, queries scaled; or their PartitionSpecs."""

  q_BTNC: Any
  latents_BSC: Any
  places_BTK: Any
  index_q_BTIH: Any
  index_weights_BTI: Any
  index_k_BSH: Any


class _Found(NamedTuple):
  """The results of sparse attention; C is the width of latent vectors alone.

  Attributes:
    y_BTNC: The weighted sums of latent vectors.
    divergence_BT: That of the indexer's distribution from the attention's; float32.
    largest_BTN: The largest logits; float32, no gradient.
  """

  y_BTNC: Any
  divergence_BT: Any
  largest_BTN: Any


_DIMS = _Given(
  ("batch", "time", "heads", None),
  ("batch", None, None),
  ("batch", "time", None),
  ("batch", "time", None, None),
  ("batch", "time", None),
  ("batch", None, None),
)


def _sparse(given: _Given, *, rank: int) -> _Found:
  """Returns sparse attention, computed by each device for its queries and heads."""
  local = functools.partial(_local, rank=rank, num_heads=given.q_BTNC.shape[2])
  if not (sizes := mesh.sizes_here(mesh.AXES)):
    return local(given)
  specs = _Given(
    *(mesh.partition(dims, x.shape, sizes) for dims, x in zip(_DIMS, given, strict=True))
  )
  batch, time, heads, _ = specs.q_BTNC
  out = _Found(specs.q_BTNC, PartitionSpec(batch, time), PartitionSpec(batch, time, heads))
  local = functools.partial(local, axes=mesh.axes_by_dim(specs.q_BTNC)[2])
  return mesh.on_each_device(local, (specs,), out)(given)


def _local(given: _Given, *, rank: int, num_heads: int, axes: tuple[str, ...] = ()) -> _Found:
  """Returns sparse attention of a device's queries and heads.

  Args:
    given: Its inputs.
    rank: The width of latent vectors.
    num_heads: The number of heads of all devices.
    axes: The mesh axes that shard them.
  """
  B, T, N, C = given.q_BTNC.shape
  K = given.places_BTK.shape[2]
  *_, index_heads, H = given.index_q_BTIH.shape
  # The gradients of all queries that select a vector are summed in float32.
  latents_BSC, index_k_BSH = (x.astype(jnp.float32) for x in (given.latents_BSC, given.index_k_BSH))

  def chunk(start: jax.Array, size: int, span: tuple[int, int]) -> _Found:
    del span
    of_queries = (given.q_BTNC, given.places_BTK, given.index_q_BTIH, given.index_weights_BTI)
    q_BTNC, places_BTK, index_q_BTIH, index_weights_BTI = (
      jax.lax.dynamic_slice_in_dim(x, start, size, 1) for x in of_queries
    )
    is_there_BTK = places_BTK >= 0
    latents_BTKC = _taken(latents_BSC, places_BTK).astype(q_BTNC.dtype)
    logits_BTNK = jnp.einsum(
      "BTNC,BTKC->BTNK", q_BTNC, latents_BTKC, preferred_element_type=jnp.float32
    )
    logits_BTNK = jnp.where(is_there_BTK[:, :, None], logits_BTNK, _MASKED)
    weights_BTNK = jax.nn.softmax(logits_BTNK)
    values_BTKC = latents_BTKC[..., :rank]
    y_BTNC = jnp.einsum("BTNK,BTKC->BTNC", weights_BTNK.astype(q_BTNC.dtype), values_BTKC)
    target_BTK = jax.lax.stop_gradient(weights_BTNK).sum(2) / num_heads
    target_BTK = jax.lax.psum(target_BTK, axes) if axes else target_BTK
    index_k_BTKH = _taken(index_k_BSH, places_BTK).astype(index_q_BTIH.dtype)
    index_logits_BTIK = jnp.einsum(
      "BTIH,BTKH->BTIK", index_q_BTIH, index_k_BTKH, preferred_element_type=jnp.float32
    )
    scores_BTK = weighted(index_logits_BTIK, index_weights_BTI)
    log_BTK = jax.nn.log_softmax(jnp.where(is_there_BTK, scores_BTK, _MASKED))
    divergence_BT = -(entr(target_BTK) + target_BTK * log_BTK).sum(-1)
    return _Found(y_BTNC, divergence_BT, jax.lax.stop_gradient(logits_BTNK).max(-1))

  most = min(256, max(1, _MOST_NUMBERS // (B * K * (C + H + N + index_heads))))
  return over_queries(chunk, T, most=most, num_spans=1)


def _taken(x_BSC: jax.Array, places_BTK: jax.Array) -> jax.Array:
  """Returns x_BTKC, the vectors at these places; -1 counts as 0."""
  return jax.vmap(lambda x_SC, places_TK: x_SC[places_TK])(x_BSC, jnp.maximum(places_BTK, 0))
