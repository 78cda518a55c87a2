# SPDX-License-Identifier: Apache-2.0
"""Multi-head (Vaswani et al., 2017) and grouped-query attention (Ainslie et al., 2023)."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers import gradient_order, module
from paxlike.layers.attention import kernels, max_logit, qk_clip
from paxlike.layers.attention.cache import KeysValues, KvCache, positions_in
from paxlike.layers.attention.kernels import Requirements
from paxlike.layers.attention.qk_clip import QkClip
from paxlike.layers.attention.relative_bias import RelativeBias
from paxlike.layers.attention.rope import Rope
from paxlike.layers.aux_losses import Aux, add, none
from paxlike.layers.call_context import Context
from paxlike.layers.linear import Linear


@configurable
class Attention(module.Module):
  """Causal self-attention over [B, T, D]."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    num_heads: ranges.Size,
    head_dim: ranges.Size,
    num_kv_heads: ranges.Size | None = None,
    query: Callable[..., Linear],
    key: Callable[..., Linear] | None,
    value: Callable[..., Linear] | None,
    output: Callable[..., Linear],
    output_gate: Callable[..., Linear] | None = None,
    rope: Callable[[int], Rope] | None = None,
    query_scale: Callable[[jax.Array], jax.Array] | None = None,
    qk_norm: Callable[..., Any] | None = None,
    value_norm: Callable[..., Any] | None = None,
    joint_qk_norm: Callable[..., Any] | None = None,
    relative_bias: Callable[[int], RelativeBias] | None = None,
    sinks: module.Initializer | None = None,
    extra_logit: ranges.Finite | None = None,
    window: ranges.Positive | None = None,
    chunk: ranges.Positive | None = None,
    soft_cap: ranges.Cap | None = None,
    scale: ranges.Finite | None = None,
    qk_clip: Callable[..., QkClip] | None = None,
    kernel: kernels.Kernel = kernels.xla,
  ):
    """Builds the layer.

    Args:
      dim: D.
      num_heads: N.
      head_dim: H.
      num_kv_heads: K; None: N.
      query: D -> N x H.
      key: D -> K x H; None: keys and values are those of the last `KvSource` with this window.
      value: D -> K x H; None: the values are the keys, before norm and rotary embedding.
      output: N x H -> D.
      output_gate: D -> N x H; its sigmoid multiplies the heads' outputs (arXiv:2505.06708).
      rope: Rotary embedding of queries and keys.
      query_scale: Maps positions [B, T] to the factors of their queries.
      qk_norm: Applied to each head's query and key.
      value_norm: Applied to each head's value.
      joint_qk_norm: In place of `qk_norm`: normalizes the queries of all heads together, and the
        keys likewise.
      relative_bias: Position bias, added to the logits; called with N.
      sinks: Initializer of a trained attention sink per head: the logit of a key without a value.
      extra_logit: A constant attention sink, the same in all heads.
      window: A token attends to itself and the `window - 1` tokens before it.
      chunk: A token attends only within its chunk of this many positions (Llama 4).
      soft_cap: Logits x become soft_cap * tanh(x / soft_cap).
      scale: Multiplier of the logits; None: 1 / sqrt(H).
      qk_clip: Bounds the logits by scaling weights down; called with N.
      kernel: The attention kernel.
    """
    self.num_heads = num_heads
    self.head_dim = head_dim
    self.num_kv_heads = _num_kv_heads(num_heads, num_kv_heads)
    _check_one_of(window=window, chunk=chunk)
    _check_one_of(qk_norm=qk_norm, joint_qk_norm=joint_qk_norm)
    self.window, self.chunk, self.soft_cap = window, chunk, soft_cap
    self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
    self.kernel = kernel
    heads = {"heads": num_heads, "head": head_dim}
    kv_heads = {"kv_heads": self.num_kv_heads, "head": head_dim}
    self.query = query({"model": dim}, heads)
    self.key = None if key is None else key({"model": dim}, kv_heads)
    self.value = None if value is None else value({"model": dim}, kv_heads)
    self.output = output(heads, {"model": dim})
    self.output_gate = None if output_gate is None else output_gate({"model": dim}, heads)
    self.rope = None if rope is None else rope(head_dim)
    self.query_scale = query_scale
    self.query_norm = _norm(heads, qk_norm, joint_qk_norm)
    self.key_norm = None if key is None else _norm(kv_heads, qk_norm, joint_qk_norm)
    self.value_norm = None if value_norm is None else value_norm(head_dim, over="head")
    self.extra_logit = extra_logit
    self.relative_bias = None if relative_bias is None else relative_bias(num_heads)
    self.qk_clip = None if qk_clip is None else qk_clip(num_heads)
    self.sinks = None if sinks is None else self.weight({"heads": num_heads}, init=sinks)

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: KvCache | None = None
  ) -> tuple[jax.Array, KvCache | None, Aux]:
    """Returns (y_BTD, the updated cache, the layer's metrics).

    With a cache, T > 1 prefills an empty cache; T == 1 decodes a token, which attends to the cache.
    """
    # Where time is sharded, the three maps save one array, x, for the backward pass; forked, two.
    is_sharded = mesh.is_sharded("time")
    for_query_BTD, x_BTD = (x_BTD, x_BTD) if is_sharded else gradient_order.fork(x_BTD)
    q_BTNH = self._prepared(self.query(for_query_BTD, context), context)
    keys_values = self._keys_values(x_BTD, context, cache)
    k_BTKH, v_BTKH, seen = keys_values
    if self.key is not None:
      cache = seen
    if seen is not None and x_BTD.shape[1] == 1:
      assert context.positions_BT is not None
      y_BNH = self._attend_to(seen, q_BTNH[:, 0], context.positions_BT)
      y_BTNH = y_BNH[:, None].astype(q_BTNH.dtype)
      return self.project(y_BTNH, x_BTD, context), cache, self.shared(keys_values)
    options: kernels.AttentionOptions = {
      "scale": self.scale,
      "segments_BT": self._segments(q_BTNH, context),
      "window": self.window,
      "soft_cap": self.soft_cap,
      "sinks_N": self._sinks(),
      "bias_NTS": self._bias(x_BTD.shape[1]),
    }
    with jax.named_scope("dot_product_attention"):
      y_BTNH = self.kernel(q_BTNH, k_BTKH, v_BTKH, **options)
    if self.qk_clip is not None:
      # Scaling weights changes neither the bias nor the cap.
      plain: kernels.AttentionOptions = {**options, "bias_NTS": None, "soft_cap": None}
      y_BTNH = self.qk_clip(y_BTNH, q_BTNH, k_BTKH, **plain)
    aux = max_logit.logged(context, q_BTNH, k_BTKH, **options)
    return self.project(y_BTNH, x_BTD, context), cache, add(aux, self.shared(keys_values))

  def shared(self, keys_values: KeysValues) -> Aux:
    """Returns those of its keys and values that later layers attend to: none; see `KvSource`."""
    del keys_values
    return none()

  def _prepared(self, q_BTNH: jax.Array, context: Context) -> jax.Array:
    """Returns queries normalized, rotated and scaled."""
    q_BTNH = mesh.constrain(q_BTNH, "batch", "time", "heads", None)
    if self.query_norm is not None:
      q_BTNH = self.query_norm(q_BTNH)
    if self.rope is not None:
      q_BTNH = self.rope(q_BTNH, context.positions_BT)
    if self.query_scale is not None:
      factor_BT = self.query_scale(_positions(q_BTNH, context))
      q_BTNH = (q_BTNH * factor_BT[:, :, None, None]).astype(q_BTNH.dtype)
    return q_BTNH

  def _keys_values(self, x_BTD: jax.Array, context: Context, cache: KvCache | None) -> KeysValues:
    """Returns keys, values and the updated cache, which may be those of an earlier layer."""
    if self.key is None:
      return context.shared[self.window or 0]
    k_BTKH = mesh.constrain(self.key(x_BTD, context), "batch", "time", "kv_heads", None)
    v_BTKH = k_BTKH
    if self.value is not None:
      v_BTKH = mesh.constrain(self.value(x_BTD, context), "batch", "time", "kv_heads", None)
    if self.key_norm is not None:
      k_BTKH = self.key_norm(k_BTKH)
    if self.value_norm is not None:
      v_BTKH = self.value_norm(v_BTKH)
    if self.rope is not None:
      k_BTKH = self.rope(k_BTKH, context.positions_BT)
    if cache is not None:
      assert context.positions_BT is not None
      cache = cache.write(k_BTKH, v_BTKH, context.positions_BT)
    return KeysValues(k_BTKH, v_BTKH, cache)

  def qk_factors(self, largest: jax.Array) -> qk_clip.Factors:
    """Returns the factors of query and key weights, given the largest logits [..., N]."""
    assert self.qk_clip is not None
    query, key = qk_clip.grouped(self.qk_clip.factors(largest), self.num_kv_heads)
    return {"query": query, "key": key}

  def project(self, y_BTNH: jax.Array, x_BTD: jax.Array, context: Context) -> jax.Array:
    """Returns y_BTD for the outputs of the heads; a variant may gate or norm these by x_BTD.

    Training, prefill and decoding with a cache (T == 1) all call it.
    """
    if self.output_gate is not None:
      gate_BTNH = mesh.constrain(self.output_gate(x_BTD, context), "batch", "time", "heads", None)
      y_BTNH *= jax.nn.sigmoid(gate_BTNH)
    return self.output(y_BTNH, context)

  def _attend_to(self, cache: KvCache, q_BNH: jax.Array, positions_B1: jax.Array) -> jax.Array:
    # The cache has at most `window` slots, so no window mask is needed.
    cached_BS = positions_in(cache.num_slots, positions_B1)
    first_B1 = 0 if self.chunk is None else jnp.maximum(positions_B1 // self.chunk * self.chunk, 0)
    bias_BNS = None
    if self.relative_bias is not None:
      bias_BNS = self.relative_bias(positions_B1 - cached_BS).swapaxes(0, 1)
    return kernels.cached(
      q_BNH,
      cache.k_BKHS,
      cache.v_BKSH,
      cached_BS >= first_B1,
      scale=self.scale,
      soft_cap=self.soft_cap,
      sinks_N=self._sinks(),
      bias_BNS=bias_BNS,
    )

  def _segments(self, q_BTNH: jax.Array, context: Context) -> jax.Array | None:
    """Returns the segments to attend within: each document's chunks are segments of their own."""
    length = q_BTNH.shape[1]
    if self.chunk is None or length <= self.chunk:
      return context.segments_BT
    chunks_BT = jnp.maximum(_positions(q_BTNH, context), 0) // self.chunk
    if context.segments_BT is None:
      return jnp.broadcast_to(chunks_BT + 1, (len(q_BTNH), length))
    return context.segments_BT * (length // self.chunk + 1) + chunks_BT

  def _bias(self, num_tokens: int) -> jax.Array | None:
    if self.relative_bias is None:
      return None
    return self.relative_bias(jnp.arange(num_tokens)[:, None] - jnp.arange(num_tokens))

  def _sinks(self) -> jax.Array | None:
    if self.extra_logit is not None:
      return jnp.full(self.num_heads, self.extra_logit)
    return None if self.sinks is None else self.sinks[...].astype(jnp.float32)

  def requirements(self, *, is_packed: bool) -> Requirements:
    """Returns the requirements on the kernel, for packed or unpacked sequences."""
    given = {
      "soft_cap": self.soft_cap,
      "sinks_N": self.sinks if self.extra_logit is None else self.extra_logit,
      "bias_NTS": self.relative_bias,
    }
    return Requirements(
      dtype=self.query.dtype,
      num_heads=self.num_heads,
      num_kv_heads=self.num_kv_heads,
      width=self.head_dim,
      value_width=self.head_dim,
      is_packed=is_packed or self.chunk is not None,
      extras=tuple(name for name, value in given.items() if value is not None),
    )

  def empty_cache(self, batch: int, length: int, dtype: Any) -> KvCache | None:
    """Returns an empty cache for `batch` sequences of up to `length` tokens; None without keys."""
    if self.key is None:
      return None
    slots = self.num_slots(length)
    return KvCache.empty(batch, slots, self.num_kv_heads, self.head_dim, self.head_dim, dtype)

  def num_slots(self, length: int) -> int:
    """Returns the number of cache slots for a sequence of `length` tokens."""
    return min(length, self.window or length, self.chunk or length)

  def score_flops(self, num_tokens: int) -> tuple[float, float]:
    """Returns the forward FLOPs per token of logits and weighted values: (full, causal).

    Full counts all pairs of tokens within the window or chunk, causal those that the causal mask
    keeps.
    """
    seen = min(num_tokens, self.window or num_tokens, self.chunk or num_tokens)
    full = 4 * seen * self.num_heads * self.head_dim
    return full, full * (0.5 if self.chunk is not None else 1 - seen / (2 * num_tokens))


@configurable
class KvSource(Attention):
  """`Attention` to whose keys and values later layers with the same window attend, too.

  These have no keys of their own (`key=None`).
  """

  def shared(self, keys_values: KeysValues) -> Aux:
    return none()._replace(shared={self.window or 0: keys_values})


def _num_kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
  if num_heads % (num_kv_heads or num_heads):
    raise ArgumentError(
      f"{num_kv_heads=} does not divide {num_heads=}: each KV head serves the same number of query"
      " heads."
    )
  return num_kv_heads or num_heads


def _check_one_of(**given: Any):
  """Raises an ArgumentError if more than one of the arguments is given."""
  if len(names := [name for name, value in given.items() if value is not None]) > 1:
    raise ArgumentError(f"{' and '.join(names)} exclude each other: leave one None.")


def _norm(dims: Mapping[str, int], each: Any, joint: Any) -> Any:
  """Returns the norm of queries or keys of these dims: of each head, of all together, or None."""
  if each is not None:
    return each(dims["head"], over="head")
  return None if joint is None else joint(dims)


def _positions(q_BTNH: jax.Array, context: Context) -> jax.Array:
  """Returns [B, T], or [1, T] if all sequences have the same."""
  if context.positions_BT is not None:
    return context.positions_BT
  return jnp.arange(q_BTNH.shape[1])[None]
