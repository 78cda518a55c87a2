# SPDX-License-Identifier: Apache-2.0
"""Attention over q, k, v: every kernel has the signature of `Kernel`.

A kernel applies every option or raises an error; it never ignores one.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError

# A sequence is split into spans of queries; each attends only to the keys up to its end, so more
# spans waste less work above the causal diagonal.
_MIN_SPAN, _MAX_SPANS = 64, 8


class AttentionOptions(TypedDict, total=False):
  """The options of a kernel, besides queries, keys and values.

  Attributes:
    scale: Multiplier of the logits.
    segments_BT: int32; tokens attend only within their segment. None: one segment per sequence.
    window: A token attends to itself and the `window - 1` tokens before it. None: no limit.
    soft_cap: Logits x become soft_cap * tanh(x / soft_cap).
    sinks_N: Attention sinks: per head, the logit of an additional key without a value.
    bias_NTS: Added to the logits.
  """

  scale: Required[float]
  segments_BT: Required[jax.Array | None]
  window: int | None
  soft_cap: float | None
  sinks_N: jax.Array | None
  bias_NTS: jax.Array | None


class Kernel(Protocol):
  """Causal attention."""

  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    **options: Unpack[AttentionOptions],
  ) -> jax.Array:
    """Returns y_BTNH in the dtype of q; its H is that of v.

    Args:
      q_BTNH: Queries.
      k_BSKH: Keys of K heads; each serves N / K query heads.
      v_BSKH: Values.
      **options: See `AttentionOptions`.
    """
    ...


class Requirements(NamedTuple):
  """The requirements on a kernel.

  Attributes:
    dtype: Of queries, keys and values.
    num_heads: N.
    num_kv_heads: K.
    width: H of queries and keys.
    value_width: H of values.
    is_packed: Whether there are segments.
    extras: The names among soft_cap, sinks_N and bias_NTS that are set; few kernels support all.
  """

  dtype: Any
  num_heads: int
  num_kv_heads: int
  width: int
  value_width: int
  is_packed: bool
  extras: tuple[str, ...]


def refuse(kernel: Callable[..., Any], options: AttentionOptions, *names: str):
  """Raises an ArgumentError if a named option is set, which the kernel does not support."""
  for name in names:
    if options.get(name) is not None:
      raise ArgumentError(f"kernel={name_of(kernel)} does not support {name}: use xla_chunked.")


def segment_starts(segments_BT: jax.Array) -> jax.Array:
  """Returns bool [B, T]: whether a run of equal segment ids begins at the token."""
  B = len(segments_BT)
  changes = segments_BT[:, 1:] != segments_BT[:, :-1]
  return jnp.concatenate([jnp.ones((B, 1), bool), changes], axis=1)


def first_seen(query: int, window: int | None) -> int:
  """Returns the first key that is visible to this query or any later one."""
  return 0 if window is None else max(query - window + 1, 0)


def name_of(kernel: Any) -> str:
  """Returns the user-facing name of a kernel."""
  function = getattr(kernel, "func", kernel)
  return getattr(function, "__name__", type(function).__name__)


@configurable
def xla(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
  """Attention as plain XLA operations, on any backend; materializes float32 T x S logits.

  If sequences are not sharded, it skips most logits that the causal mask or the window hides.
  """
  outputs = []
  for first, end, first_key in spans(q_BTNH.shape[1], options.get("window")):
    keys = slice(first_key, end)
    q = q_BTNH[:, first:end]
    outputs.append(
      attend_slice(
        q, k_BSKH[:, keys], v_BSKH[:, keys], first_query=first, first_key=first_key, **options
      )
    )
  return jnp.concatenate(outputs, axis=1)


def spans(length: int, window: int | None) -> list[tuple[int, int, int]]:
  """Returns (first query, end, first visible key) of the spans of a sequence; see `_MIN_SPAN`.

  One if the current mesh shards sequences.
  """
  num_spans = 1 if mesh.is_sharded("time") else min(max(length // _MIN_SPAN, 1), _MAX_SPANS)
  ends = [length * place // num_spans for place in range(num_spans + 1)]
  return [(first, end, first_seen(first, window)) for first, end in itertools.pairwise(ends)]


def attend_slice(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  sinks_N: jax.Array | None = None,
  **options: Any,
) -> jax.Array:
  """Returns attention of a slice of the queries to a slice of the keys; see `masked_logits`."""
  B, T, N, _ = q_BTNH.shape
  K = k_BSKH.shape[2]
  logits_BKGTS = masked_logits(q_BTNH, k_BSKH, **options)
  if sinks_N is None:
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1)
  else:
    sinks = jnp.broadcast_to(sinks_N.reshape(K, N // K, 1, 1), (B, K, N // K, T, 1))
    weights_BKGTS = jax.nn.softmax(jnp.concatenate([logits_BKGTS, sinks], axis=-1))[..., :-1]
  y_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
  return y_BTKGH.reshape(B, T, N, v_BSKH.shape[-1])


def masked_logits(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  *,
  first_query: int | jax.Array,
  first_key: int | jax.Array,
  scale: float,
  segments_BT: jax.Array | None,
  window: int | None = None,
  soft_cap: float | None = None,
  bias_NTS: jax.Array | None = None,
) -> jax.Array:
  """Returns the logits of a slice of the queries and a slice of the keys: float32, masked: -1e30.

  The slices begin at `first_query` and `first_key`; array options cover the full sequences.
  """
  B, T, N, H = q_BTNH.shape
  K, S = k_BSKH.shape[2], k_BSKH.shape[1]

  def of_queries(x: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first_query, T, axis)

  def of_keys(x: jax.Array, axis: int) -> jax.Array:
    if isinstance(first_key, int):
      return jax.lax.slice_in_dim(x, first_key, first_key + S, axis=axis)
    return jax.lax.dynamic_slice_in_dim(x, first_key, S, axis)

  q_BTKGH = (q_BTNH * scale).reshape(B, T, K, N // K, H)
  logits_BKGTS = jnp.einsum(
    "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
  )
  logits_BKGTS = _capped(logits_BKGTS, soft_cap)
  if bias_NTS is not None:
    logits_BKGTS += of_queries(of_keys(bias_NTS, 2), 1).reshape(K, N // K, T, S)
  distance_TS = (first_query + jnp.arange(T))[:, None] - (first_key + jnp.arange(S))
  visible = distance_TS >= 0
  if window is not None:
    visible &= distance_TS < window
  if segments_BT is not None:
    same_BTS = of_queries(segments_BT, 1)[:, :, None] == of_keys(segments_BT, 1)[:, None, :]
    visible = (visible & same_BTS)[:, None, None]
  return jnp.where(visible, logits_BKGTS, -1e30)


def cached(
  q_BNH: jax.Array,
  k_BKHS: jax.Array,
  v_BKSH: jax.Array,
  visible_BS: jax.Array,
  *,
  scale: float,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
  bias_BNS: jax.Array | None = None,
) -> jax.Array:
  """Attention of one query per sequence to a cache: returns y_BNH in the dtype of the queries.

  Args:
    q_BNH: The queries.
    k_BKHS: Cached keys.
    v_BKSH: Cached values.
    visible_BS: The slots that a query attends to.
    scale: See `AttentionOptions`.
    soft_cap: See `AttentionOptions`.
    sinks_N: See `AttentionOptions`.
    bias_BNS: Added to the logits.
  """
  B, N, H = q_BNH.shape
  K = k_BKHS.shape[1]
  q_BKGH = (q_BNH * scale).astype(k_BKHS.dtype).reshape(B, K, N // K, H)
  logits = jnp.einsum("BKGH,BKHS->BKGS", q_BKGH, k_BKHS, preferred_element_type=jnp.float32)
  logits = _capped(logits, soft_cap)
  if bias_BNS is not None:
    logits += bias_BNS.reshape(B, K, N // K, -1)
  logits = jnp.where(visible_BS[:, None, None], logits, -1e30)
  maximum = logits.max(-1, keepdims=True)
  sinks = None if sinks_N is None else sinks_N.reshape(K, N // K, 1)
  maximum = maximum if sinks is None else jnp.maximum(maximum, sinks)
  weights = jnp.exp(logits - maximum)
  total = weights.sum(-1, keepdims=True)
  total = total if sinks is None else total + jnp.exp(sinks - maximum)
  # Normalized last: y has fewer elements than the weights.
  y_BKGH = jnp.einsum(
    "BKGS,BKSH->BKGH", weights.astype(v_BKSH.dtype), v_BKSH, preferred_element_type=jnp.float32
  )
  return (y_BKGH / total).astype(q_BNH.dtype).reshape(B, N, -1)


def _capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
  return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
