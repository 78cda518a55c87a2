# SPDX-License-Identifier: Apache-2.0
"""Causal attention in NumPy, in float64, one query at a time: what a kernel has to compute."""

import numpy as np


def attention(
  q_BTNH: np.ndarray,
  k_BSKH: np.ndarray,
  v_BSKH: np.ndarray,
  *,
  scale: float,
  segments_BT: np.ndarray | None = None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: np.ndarray | None = None,
) -> np.ndarray:
  """Returns BTNH in float64; query head n reads key head n // (N / K). See `layers.Options`."""
  B, T, N, _ = q_BTNH.shape
  y_BTNH = np.zeros((B, T, N, v_BSKH.shape[-1]))
  for b, t, n in np.ndindex(B, T, N):
    head = n // (N // k_BSKH.shape[2])
    first = 0 if window is None else max(t - window + 1, 0)
    keys = np.arange(first, t + 1)
    if segments_BT is not None:
      keys = keys[segments_BT[b, keys] == segments_BT[b, t]]
    logits = k_BSKH[b, keys, head].astype(float) @ q_BTNH[b, t, n].astype(float) * scale
    if soft_cap is not None:
      logits = soft_cap * np.tanh(logits / soft_cap)
    weights = np.exp(logits)
    total = weights.sum() + (0 if sinks_N is None else np.exp(sinks_N[n]))
    y_BTNH[b, t, n] = weights / total @ v_BSKH[b, keys, head]
  return y_BTNH
