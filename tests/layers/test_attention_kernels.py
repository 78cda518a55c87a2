# SPDX-License-Identifier: Apache-2.0
from typing import Any

import jax
import numpy as np
import pytest

from paxlike.layers import attention_kernels


def reference(q, k, v, scale, segments):
  """Ten lines of NumPy, a query at a time."""
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(q.shape[:3]):
    visible = np.arange(t + 1)
    if segments is not None:
      visible = visible[segments[b, : t + 1] == segments[b, t]]
    logits = k[b, visible, n // group] @ q[b, t, n] * scale
    weights = np.exp(logits - logits.max())
    out[b, t, n] = weights / weights.sum() @ v[b, visible, n // group]
  return out


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_kernel_equals_numpy(num_kv_heads, packed):
  random: Any = np.random.default_rng(0)
  q = random.normal(size=(2, 7, 4, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, 7, num_kv_heads, 8)).astype(np.float32)
  segments: Any = (
    np.array([[1, 1, 1, 2, 2, 3, 0], [1, 2, 2, 2, 2, 2, 2]], np.int32) if packed else None
  )
  got = attention_kernels.xla(q, k, v, scale=0.3, segments_BT=segments)
  np.testing.assert_allclose(got, reference(q, k, v, 0.3, segments), atol=1e-5)


def test_the_future_has_no_gradient():
  q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 4))

  def third_output(k, v):
    return attention_kernels.xla(q, k, v, scale=1.0, segments_BT=None)[:, 2].sum()

  for gradient in jax.grad(third_output, (0, 1))(k, v):
    assert np.all(np.asarray(gradient[:, 3:]) == 0)
    assert np.any(np.asarray(gradient[:, :3]) != 0)
