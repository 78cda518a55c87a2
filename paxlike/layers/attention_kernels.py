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
  ) -> jax.Array:
    """Returns BTNH in q's dtype.

    Args:
      q_BTNH: Queries of N heads.
      k_BSKH: Keys of K heads; each serves N / K heads.
      v_BSKH: Values.
      scale: Factor of the logits.
      segments_BT: int32; tokens attend only within their segment. None: one segment a row.
    """
    ...


def xla(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  scale: float,
  segments_BT: jax.Array | None,
) -> jax.Array:
  """Attention as plain XLA operations, on any backend; holds the T x S logits in float32."""
  B, T, N, H = q_BTNH.shape
  K, S = k_BSKH.shape[2], k_BSKH.shape[1]
  q_BTKGH = (q_BTNH * scale).reshape(B, T, K, N // K, H)
  logits_BKGTS = jnp.einsum(
    "BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32
  )
  visible = jnp.arange(T)[:, None] >= jnp.arange(S)
  if segments_BT is not None:
    same_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
    visible = (visible & same_BTS)[:, None, None]
  weights_BKGTS = jax.nn.softmax(jnp.where(visible, logits_BKGTS, -1e30), axis=-1)
  y_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BKGTS.astype(v_BSKH.dtype), v_BSKH)
  return y_BTKGH.reshape(B, T, N, H)
