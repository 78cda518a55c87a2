# SPDX-License-Identifier: Apache-2.0
"""Flash attention for CPUs (Dao et al., 2022, arXiv:2205.14135), in XLA operations.

A span of queries at a time, so that its logits stay in the cache of the processor. The backward
pass computes them again, keys first: two of its three products then need no transposition. It has
no forward-mode derivatives (`jax.jvp`).
"""

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.layers.attention.kernels import AttentionOptions, refuse, spans
from paxlike.layers.attention.sharded_kernel import per_device
from paxlike.layers.precision import cpu_dots


@configurable
def flash_cpu(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
  """Flash attention for CPUs; see `Kernel`. Runs anywhere, but is fast only there.

  `scale` is a Python number.

  Raises:
    ArgumentError: soft_cap, sinks_N or bias_NTS is set.
  """
  refuse(flash_cpu, options, "soft_cap", "sinks_N", "bias_NTS")

  def kernel(q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array | None) -> Any:
    return _attention(options["scale"], options.get("window"), q, k, v, segments_BT)

  return per_device(kernel, q_BTNH, k_BSKH, v_BSKH, options, "segments_BT", block=1)


class Operands(NamedTuple):
  """Queries, keys and values by key head: G = B K, and R = N / K queries for each key.

  Attributes:
    q_GRTH: Queries, scaled.
    k_GSH: Keys.
    v_GSH: Values.
  """

  q_GRTH: jax.Array
  k_GSH: jax.Array
  v_GSH: jax.Array

  @classmethod
  def of(cls, scale: float, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> "Operands":
    """Returns the operands."""
    return cls(by_key(q_BTNH * scale, k_BSKH), of_keys(k_BSKH), of_keys(v_BSKH))


def by_key(x_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
  """Returns [G, R, T, H] of queries or outputs."""
  B, T, N, H = x_BTNH.shape
  K = k_BSKH.shape[2]
  x_BTKRH = x_BTNH.reshape(B, T, K, N // K, H)
  return x_BTKRH.transpose(0, 2, 3, 1, 4).reshape(B * K, N // K, T, H)


def of_keys(x_BSKH: jax.Array) -> jax.Array:
  """Returns [G, S, H] of keys or values."""
  B, S, K, H = x_BSKH.shape
  return x_BSKH.transpose(0, 2, 1, 3).reshape(B * K, S, H)


def by_token(x_GRTH: jax.Array, B: int) -> jax.Array:
  """Returns [B, T, N, H] of [G, R, T, H]."""
  G, R, T, H = x_GRTH.shape
  x_BKRTH = x_GRTH.reshape(B, G // B, R, T, H)
  return x_BKRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, G // B * R, H)


def masked(
  logits_GMS: jax.Array,
  segments_BT: jax.Array | None,
  *,
  first: int,
  end: int,
  first_key: int,
  window: int | None,
  keys_first: bool,
) -> jax.Array:
  """Returns logits of queries [first, end), R of them a key, and keys [first_key, end), masked.

  They are [G, R T, S] or, if `keys_first`, [G, S, R T].
  """
  if segments_BT is None and window is None and first > first_key:
    # All queries see the keys before the first of them; only their own are masked, in place.
    part = slice(first - first_key, None)
    own = (slice(None), part) if keys_first else (slice(None), slice(None), part)
    logits_of_own = masked(
      logits_GMS[own],
      None,
      first=first,
      end=end,
      first_key=first,
      window=None,
      keys_first=keys_first,
    )
    return logits_GMS.at[own].set(logits_of_own)
  distance_TS = jnp.arange(first, end)[:, None] - jnp.arange(first_key, end)
  visible_BTS = (distance_TS >= 0)[None]
  if window is not None:
    visible_BTS &= distance_TS < window
  if segments_BT is not None:
    visible_BTS &= segments_BT[:, first:end, None] == segments_BT[:, None, first_key:end]
  shape = logits_GMS.shape
  B, T, S = visible_BTS.shape
  if keys_first:
    logits = logits_GMS.reshape(B, -1, S, shape[2] // T, T)
    visible = visible_BTS.swapaxes(1, 2)[:, None, :, None]
  else:
    logits = logits_GMS.reshape(B, -1, shape[1] // T, T, S)
    visible = visible_BTS[:, None, None]
  return jnp.where(visible, logits, -1e30).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(scale: float, window: int | None, *arrays: Any) -> jax.Array:
  return _forward(scale, window, *arrays)[0]


def _forward(
  scale: float,
  window: int | None,
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments_BT: jax.Array | None,
) -> tuple[jax.Array, Any]:
  q_GRTH, k_GSH, v_GSH = Operands.of(scale, q_BTNH, k_BSKH, v_BSKH)
  G, R, T, _ = q_GRTH.shape
  outputs, normalizers = [], []
  for first, end, first_key in spans(T, window):
    q_GMH = q_GRTH[:, :, first:end].reshape(G, R * (end - first), -1)
    logits_GMS = cpu_dots.dot(q_GMH, k_GSH[:, first_key:end], -1, dtype=jnp.float32)
    logits_GMS = masked(
      logits_GMS,
      segments_BT,
      first=first,
      end=end,
      first_key=first_key,
      window=window,
      keys_first=False,
    )
    maximum_GM1 = logits_GMS.max(-1, keepdims=True)
    weights_GMS = jnp.exp(logits_GMS - maximum_GM1)
    total_GM1 = weights_GMS.sum(-1, keepdims=True)
    # Normalized last: y has fewer elements than the weights.
    y_GMH = cpu_dots.dot(
      weights_GMS.astype(v_GSH.dtype), v_GSH[:, first_key:end], -2, dtype=jnp.float32
    )
    outputs.append((y_GMH / total_GM1).astype(q_BTNH.dtype).reshape(G, R, end - first, -1))
    normalizers.append((maximum_GM1 + jnp.log(total_GM1)).reshape(G, R, end - first))
  y_BTNH = by_token(jnp.concatenate(outputs, 2), len(q_BTNH))
  normalizer_GRT = jnp.concatenate(normalizers, 2)
  return y_BTNH, (q_BTNH, k_BSKH, v_BSKH, segments_BT, y_BTNH, normalizer_GRT)


def _backward(scale: float, window: int | None, saved: Any, dy_BTNH: jax.Array) -> tuple[Any, ...]:
  q_BTNH, k_BSKH, v_BSKH, segments_BT, y_BTNH, normalizer_GRT = saved
  q_GRTH, k_GSH, v_GSH = Operands.of(scale, q_BTNH, k_BSKH, v_BSKH)
  dtype = q_BTNH.dtype
  G, R, T, _ = q_GRTH.shape
  B, S, K, _ = k_BSKH.shape
  dy_GRTH = by_key(dy_BTNH, k_BSKH)
  # The sum over keys of each weight times its gradient.
  mean_BTN = (y_BTNH.astype(jnp.float32) * dy_BTNH.astype(jnp.float32)).sum(-1)
  mean_GRT = by_key(mean_BTN[..., None], k_BSKH)[..., 0]
  dk_GSH, dv_GSH = (jnp.zeros(x.shape, jnp.float32) for x in (k_GSH, v_GSH))
  dqs = []
  for first, end, first_key in spans(T, window):
    queries, keys = slice(first, end), slice(first_key, end)
    q_GMH, dy_GMH = (x[:, :, queries].reshape(G, R * (end - first), -1) for x in (q_GRTH, dy_GRTH))
    normalizer_G1M, mean_G1M = (
      x[:, :, queries].reshape(G, 1, -1) for x in (normalizer_GRT, mean_GRT)
    )
    logits_GSM = cpu_dots.dot(k_GSH[:, keys], q_GMH, -1, dtype=jnp.float32)
    logits_GSM = masked(
      logits_GSM,
      segments_BT,
      first=first,
      end=end,
      first_key=first_key,
      window=window,
      keys_first=True,
    )
    weights_GSM = jnp.exp(logits_GSM - normalizer_G1M)
    dv_GSH = dv_GSH.at[:, keys].add(
      cpu_dots.dot(weights_GSM.astype(dtype), dy_GMH, -2, dtype=jnp.float32)
    )
    dweights_GSM = cpu_dots.dot(v_GSH[:, keys], dy_GMH, -1, dtype=jnp.float32)
    dlogits_GSM = (weights_GSM * (dweights_GSM - mean_G1M)).astype(dtype)
    dk_GSH = dk_GSH.at[:, keys].add(cpu_dots.dot(dlogits_GSM, q_GMH, -2, dtype=jnp.float32))
    dq_GMH = cpu_dots.dot(cpu_dots.transposed(dlogits_GSM), k_GSH[:, keys], -2, dtype=jnp.float32)
    dqs.append((dq_GMH * scale).astype(dtype).reshape(G, R, end - first, -1))
  dk_BSKH, dv_BSKH = (x.reshape(B, K, S, -1).swapaxes(1, 2) for x in (dk_GSH, dv_GSH))
  dq_BTNH = by_token(jnp.concatenate(dqs, 2), B)
  return dq_BTNH, dk_BSKH.astype(k_BSKH.dtype), dv_BSKH.astype(v_BSKH.dtype), None


_attention.defvjp(_forward, _backward)
