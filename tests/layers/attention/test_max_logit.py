# SPDX-License-Identifier: Apache-2.0
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.layers.attention import kernels, max_logit

T = 13


def reference(q, k, *, scale, segments_BT, window=None, soft_cap=None, bias_NTS=None, sinks_N=None):
  """NumPy, a pair at a time."""
  del sinks_N
  largest = np.zeros(q.shape[2])
  for b, t, s, n in np.ndindex(len(q), T, T, q.shape[2]):
    if s > t or (window is not None and t - s >= window):
      continue
    if segments_BT is not None and segments_BT[b, s] != segments_BT[b, t]:
      continue
    logit = q[b, t, n] @ k[b, s, n // (q.shape[2] // k.shape[2])] * scale
    logit = logit if soft_cap is None else soft_cap * np.tanh(logit / soft_cap)
    largest[n] = max(largest[n], logit + (0 if bias_NTS is None else bias_NTS[n, t, s]))
  return largest


@pytest.mark.parametrize("most_logits", [100, 2**26])
@pytest.mark.parametrize(
  "options",
  [{}, {"window": 3}, {"soft_cap": 0.7}, {"bias_NTS": None}, {"sinks_N": np.full(4, 99.0)}],
  ids=lambda options: "_".join(options),
)
@pytest.mark.parametrize("packed", [False, True])
def test_it_is_the_largest_visible_logit_of_each_head(options, packed, most_logits, monkeypatch):
  monkeypatch.setattr(kernels, "_MIN_SPAN", 4)
  monkeypatch.setattr(max_logit, "_MOST_LOGITS", most_logits)
  random = np.random.default_rng(0)
  q, k = random.normal(size=(2, T, 4, 8)), random.normal(size=(2, T, 2, 8))
  q, k = q.astype(np.float32), k.astype(np.float32)
  q[:, 0] *= 9  # Pairs that the causal mask hides would be larger.
  k[:, -1] *= 9
  if "bias_NTS" in options:
    options = {"bias_NTS": random.normal(size=(4, T, T)).astype(np.float32)}
  segments = np.repeat([[1] * 5 + [2] * 8], 2, 0).astype(np.int32) if packed else None
  options = {"scale": 0.3, "segments_BT": segments, **options}
  got: Any = jax.jit(lambda q, k: max_logit.max_logits(q, k, **options))(q, k)
  np.testing.assert_allclose(got, reference(q, k, **options), rtol=1e-5)


def test_it_is_at_least_zero():
  q = jnp.ones((1, T, 1, 8))
  assert not max_logit.max_logits(q, -q, scale=1.0, segments_BT=None).any()
