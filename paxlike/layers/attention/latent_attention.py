# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (MLA; DeepSeek-V2, DeepSeek-AI, 2024)."""

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
from paxlike.layers.attention import kernels, max_logit, qk_clip
from paxlike.layers.attention.cache import LatentCache, positions_in
from paxlike.layers.attention.kernels import Requirements
from paxlike.layers.attention.qk_clip import QkClip
from paxlike.layers.attention.rope import Rope
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear
from paxlike.layers.precision import cpu_dots


class Queries(NamedTuple):
  """The queries of heads, q_BTNH without rotary dims."""

  q_BTNH: jax.Array
  rotary_BTNR: jax.Array


class Latents(NamedTuple):
  """What a token's keys and values are made of: the latent vector and the rotary key."""

  c_BTC: jax.Array
  key_BTR: jax.Array


@configurable
class LatentAttention(module.Module):
  """Causal self-attention over [B, T, D] that caches latent vectors instead of keys and values.

  A key concatenates an up-projection of the token's latent vector and a rotary key shared by all
  heads. Decoding absorbs the up-projection into the query, so it never materializes keys. C is the
  width of the latent vector, R that of the rotary key.
  """

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_heads: ranges.Size,
    head_dim: ranges.Size,
    rope_dim: ranges.Size,
    value_dim: ranges.Size,
    rank: ranges.Size,
    query_rank: ranges.Size | None,
    query_down: Callable[..., Linear] | None,
    query: Callable[..., Linear],
    latent: Callable[..., Linear],
    key_value: Callable[..., Linear],
    output: Callable[..., Linear],
    norm: Callable[..., Any],
    rope: Callable[[int], Rope],
    scale: ranges.Finite | None = None,
    qk_clip: Callable[..., QkClip] | None = None,
    kernel: kernels.Kernel = kernels.xla,
  ):
    """Builds the layer.

    Args:
      dim: D.
      num_heads: N.
      head_dim: Width of a head without its rotary dims.
      rope_dim: R.
      value_dim: Width of a head's value.
      rank: C.
      query_rank: Width of the queries' latent vector; None: queries are projected from D.
      query_down: D -> query_rank; None if there is no query latent.
      query: query_rank (or D) -> N x (head_dim + rope_dim).
      latent: D -> rank + rope_dim.
      key_value: rank -> N x (head_dim + value_dim).
      output: N x value_dim -> D.
      norm: Applied to the latents.
      rope: Applied to the rotary dims of queries and keys.
      scale: Multiplier of the logits; None: 1 / sqrt(head_dim + rope_dim).
      qk_clip: See `Attention`.
      kernel: The attention kernel.
    """
    if rope_dim % 2:
      raise ArgumentError(f"{rope_dim=} must be even: rotary positions rotate pairs of dims.")
    self.num_heads = num_heads
    self.head_dim = head_dim
    self.value_dim = value_dim
    self.rank = rank
    self.rope_dim = rope_dim
    self.scale = 1 / math.sqrt(head_dim + rope_dim) if scale is None else scale
    self.kernel = kernel
    heads = {"heads": num_heads, "head": head_dim + rope_dim}
    if query_down is None or query_rank is None:
      self.query_down, self.query_norm = None, None
      self.query = query({"model": dim}, heads)
    else:
      self.query_down = query_down({"model": dim}, {"rank": query_rank})
      self.query_norm = norm(query_rank, over="rank")
      self.query = query({"rank": query_rank}, heads)
    self.latent = latent({"model": dim}, {"rank": rank + rope_dim})
    self.latent_norm = norm(rank, over="rank")
    self.key_value = key_value({"rank": rank}, {"heads": num_heads, "head": head_dim + value_dim})
    self.output = output({"heads": num_heads, "head": value_dim}, {"model": dim})
    self.rope = rope(rope_dim)
    self.qk_clip = None if qk_clip is None else qk_clip(num_heads)

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: LatentCache | None = None
  ) -> tuple[jax.Array, LatentCache | None, Aux]:
    """Returns (y_BTD, the updated cache, the layer's metrics); see `Attention`."""
    positions_BT = context.positions_BT
    queries = self._queries(self._query_latent(x_BTD, context), context)
    latents = self._latents(x_BTD, context)
    if cache is not None:
      assert positions_BT is not None
      cache = cache.write(jnp.concatenate(latents, axis=-1), positions_BT)
      if x_BTD.shape[1] == 1:
        visible_BS = positions_in(cache.num_slots, positions_BT) >= 0
        y_BTNH = self._attend_to(cache.latents_BCS, visible_BS, queries)
        return self.project(y_BTNH, x_BTD, context), cache, none()
    y_BTNH, aux = self._attend(queries, latents, context)
    return self.project(y_BTNH, x_BTD, context), cache, aux

  def qk_factors(self, largest: jax.Array) -> qk_clip.Factors:
    """See `Attention.qk_factors`.

    All heads share the rotary key, which is not scaled; rotary queries get the whole factor.
    """
    assert self.qk_clip is not None
    factor = self.qk_clip.factors(largest)[..., None]
    half, stays = jnp.sqrt(factor), jnp.ones_like(factor)

    def joined(*parts: tuple[jax.Array, int]) -> jax.Array:
      return jnp.concatenate([jnp.repeat(x, width, axis=-1) for x, width in parts], axis=-1)

    return {
      "query": joined((half, self.head_dim), (factor, self.rope_dim)),
      "key_value": joined((half, self.head_dim), (stays, self.value_dim)),
    }

  def project(self, y_BTNH: jax.Array, x_BTD: jax.Array, context: Context) -> jax.Array:
    """See `Attention.project`."""
    del x_BTD
    return self.output(y_BTNH, context)

  def _attend(self, queries: Queries, latents: Latents, context: Context) -> tuple[jax.Array, Aux]:
    """Returns (the outputs of heads y_BTNH, the layer's metrics) by the kernel."""
    k_BTNH, v_BTNH = jnp.split(self.key_value(latents.c_BTC, context), [self.head_dim], axis=-1)
    key_BTNR = jnp.broadcast_to(latents.key_BTR[:, :, None], (*k_BTNH.shape[:3], self.rope_dim))
    q_BTNH = jnp.concatenate(queries, axis=-1)
    k_BTNH = jnp.concatenate([k_BTNH, key_BTNR], axis=-1)
    options: kernels.AttentionOptions = {"scale": self.scale, "segments_BT": context.segments_BT}
    with jax.named_scope("dot_product_attention"):
      y_BTNH = self.kernel(q_BTNH, k_BTNH, v_BTNH, **options)
    if self.qk_clip is not None:
      y_BTNH = self.qk_clip(y_BTNH, q_BTNH, k_BTNH, **options)
    return y_BTNH, max_logit.logged(context, q_BTNH, k_BTNH, **options)

  def _query_latent(self, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns what queries are projected from: their latent vectors or x_BTD."""
    if self.query_down is None or self.query_norm is None:
      return x_BTD
    return self.query_norm(self.query_down(x_BTD, context))

  def _queries(self, x_BTC: jax.Array, context: Context) -> Queries:
    q_BTNH = self.query(x_BTC, context)
    q_BTNH = mesh.constrain(q_BTNH, "batch", "time", "heads", None)
    q_BTNH, rotary_BTNR = jnp.split(q_BTNH, [self.head_dim], axis=-1)
    return Queries(q_BTNH, self.rope(rotary_BTNR, context.positions_BT))

  def _latents(self, x_BTD: jax.Array, context: Context) -> Latents:
    latent_BTC, key_BTR = jnp.split(self.latent(x_BTD, context), [self.rank], axis=-1)
    key_BT1R = self.rope(key_BTR[:, :, None], context.positions_BT)
    return Latents(self.latent_norm(latent_BTC), key_BT1R[:, :, 0])

  def _attend_to(
    self, latents_BCS: jax.Array, visible_BS: jax.Array, queries: Queries
  ) -> jax.Array:
    """Returns y_B1NH of one query per sequence and cached vectors, of which some are visible."""
    dtype = queries.q_BTNH.dtype
    w_NCH = self.key_value.matrix().astype(dtype).swapaxes(0, 1)
    to_key_NCH, to_value_NCH = jnp.split(w_NCH, [self.head_dim], axis=-1)
    q_BNC = cpu_dots.dot_of_heads(queries.q_BTNH[:, 0], to_key_NCH, -1)
    # Multi-query attention: the latent vector is the key and the value of one KV head.
    y_BNC = kernels.cached(
      jnp.concatenate([q_BNC, queries.rotary_BTNR[:, 0]], axis=-1),
      latents_BCS[:, None],
      latents_BCS[:, None, : self.rank].swapaxes(2, 3),
      visible_BS,
      scale=self.scale,
    )
    return cpu_dots.dot_of_heads(y_BNC.astype(dtype), to_value_NCH, -2)[:, None]

  def requirements(self, *, is_packed: bool) -> Requirements:
    """See `Attention.requirements`."""
    return Requirements(
      dtype=self.query.dtype,
      num_heads=self.num_heads,
      num_kv_heads=self.num_heads,
      width=self.head_dim + self.rope_dim,
      value_width=self.value_dim,
      is_packed=is_packed,
      extras=(),
    )

  def empty_cache(self, batch: int, length: int, dtype: Any) -> LatentCache:
    """Returns an empty cache for `batch` sequences of up to `length` tokens."""
    return LatentCache.empty(batch, length, self.rank + self.rope_dim, dtype)

  def num_slots(self, length: int) -> int:
    """Returns the number of cache slots for a sequence of `length` tokens."""
    return length

  def score_flops(self, num_tokens: int) -> tuple[float, float]:
    """See `Attention.score_flops`."""
    full = 2 * num_tokens * self.num_heads * (self.head_dim + self.rope_dim + self.value_dim)
    return full, full / 2
