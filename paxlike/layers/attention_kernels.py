# SPDX-License-Identifier: Apache-2.0
"""Attention over q, k, v: every kernel has the signature of `Kernel`.

A kernel honours every argument or refuses it with an error, never ignores one.
"""

from typing import Protocol

import jax
import jax.numpy as jnp


class Kernel(Protocol):
  """Causal attention."""

  def __call__(
    self,
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    scale: float,
    segments_BT: jax.Array | None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    bias_NTS: jax.Array | None = None,
    positions: tuple[jax.Array, jax.Array] | None = None,
  ) -> jax.Array:
    """Returns BTNH, its H that of v, in q's dtype.

    Args:
      q_BTNH: Queries of N heads.
      k_BSKH: Keys of K heads; each serves N / K heads.
      v_BSKH: Values.
      scale: Factor of the logits.
      segments_BT: int32; tokens attend only within their segment. None: one segment a row.
      window: A token sees itself and the `window - 1` tokens before it. None: all before it.
      soft_cap: Logits x become soft_cap * tanh(x / soft_cap).
      sinks_N: Logits of a key without value that every query sees as well.
      bias_NTS: Added to the logits, or BNTS.
      positions: [B or 1, T] and [B or 1, S], where queries and keys stand, keys below 0 nowhere.
        None: both from 0 on, T = S.
    """
    ...


def xla(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  scale: float,
  segments_BT: jax.Array | None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
  bias_NTS: jax.Array | None = None,
  positions: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
  """Attention as plain XLA operations, on any backend; holds the T x S logits in float32."""
  B, T, N, H = q_BTNH.shape
  K, S = k_BSKH.shape[2], k_BSKH.shape[1]
  q_BTKGH = (q_BTNH * scale).reshape(B, T, K, N // K, H)
  logits_BKGTS = jnp.einsum(
    "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
  )
  if soft_cap is not None:
    logits_BKGTS = soft_cap * jnp.tanh(logits_BKGTS / soft_cap)
  if bias_NTS is not None:
    logits_BKGTS += bias_NTS.reshape(*bias_NTS.shape[:-3], K, N // K, T, S)
  visible = _visible(T, S, segments_BT, window, positions)
  logits_BKGTS = jnp.where(visible, logits_BKGTS, -1e30)
  if sinks_N is None:
    weights_BKGTS = jax.nn.softmax(logits_BKGTS, axis=-1)
  else:
    sinks = jnp.broadcast_to(sinks_N.reshape(K, N // K, 1, 1), (B, K, N // K, T, 1))
    weights_BKGTS = jax.nn.softmax(jnp.concatenate([logits_BKGTS, sinks], axis=-1))[..., :-1]
  y_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
  return y_BTKGH.reshape(B, T, N, v_BSKH.shape[-1])


def _visible(
  T: int,
  S: int,
  segments_BT: jax.Array | None,
  window: int | None,
  positions: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
  """Returns which keys each query sees, as a boolean that broadcasts to BKGTS."""
  q, k = (jnp.arange(T)[None], jnp.arange(S)[None]) if positions is None else positions
  distance = q[:, :, None] - k[:, None, :]
  visible = distance >= 0
  if positions is not None:
    visible &= k[:, None, :] >= 0
  if window is not None:
    visible &= distance < window
  if segments_BT is not None:
    visible &= segments_BT[:, :, None] == segments_BT[:, None, :]
  return visible[:, None, None]
