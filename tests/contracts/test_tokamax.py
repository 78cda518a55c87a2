# SPDX-License-Identifier: Apache-2.0
"""What tokamax means by the arguments of attention, and that `layers.tokamax` passes that.

Callee: tokamax 0.0.17, tokamax/_src/ops/attention/.
- api.py, `dot_product_attention`: q [B, T, N, H], k and v [B, S, K, H], bias [B, N, T, S] or fewer
  dims. `scale` multiplies q . k (None: 1 / sqrt(H)); `logits_soft_cap` caps scale * q . k *plus the
  bias*; `local_window_size=(before, after)` leaves the token itself out of the count and is no
  causal mask by itself: with `is_causal` the window of w tokens is (w - 1, 0). `implementation`: a
  sequence is tried in turn, and the next one is taken *silently* after NotImplementedError; of one
  it is raised. A callable in it is called with bias, mask, logits_scale, precision, logits_soft_cap
  and q_sharding.
- base.py, `Mask`: `k_start` [B, h, T] is, for each query, the first key that it sees (inclusive);
  `k_end` is exclusive. `&` intersects. `AUTO` is its name for a scale of 1 / sqrt(H), and not None.
- pallas_mosaic_gpu.py and pallas_mosaic_gpu_vjp.py raise NotImplementedError for what they lack:
  GPUs other than Ampere, Hopper and Blackwell (backward pass: Hopper and Blackwell), dtypes that
  are neither 16 bits wide nor (forward) float32. None of them falls back to another implementation.
- pallas_mosaic_gpu_common.py, `decompose_mask`: a window and `k_start` stay ranges of keys, and no
  T x S array is made.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.plain_attention import attention

from paxlike.layers import tokamax

library = pytest.importorskip("tokamax")
api = pytest.importorskip("tokamax._src.ops.attention.api")
base = pytest.importorskip("tokamax._src.ops.attention.base")
common = pytest.importorskip("tokamax._src.ops.attention.pallas_mosaic_gpu_common")


@pytest.fixture
def called(monkeypatch):
  """A record of what reaches the kernel for GPUs, whose place the one in plain XLA takes."""
  record: dict[str, Any] = {}

  def kernel(q, k, v, **arguments):
    record.update(arguments, q=q, k=k, v=v)
    return api.IMPLEMENTATIONS["xla"](q, k, v, **arguments)

  implementations = dict(api.IMPLEMENTATIONS) | {"mosaic_gpu": kernel}
  monkeypatch.setattr(api, "IMPLEMENTATIONS", implementations)
  return record


def inputs(length: int = 40) -> Any:
  random = np.random.default_rng(0)
  q = random.normal(size=(2, length, 4, 8)).astype(np.float32)
  k, v = random.normal(size=(2, 2, length, 2, 8)).astype(np.float32)
  segments = np.sort(random.integers(0, 4, (2, length))).astype(np.int32)
  return q, k, v, segments


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 500])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_what_reaches_the_kernel_is_causal_attention(called, packed, window, soft_cap):
  q, k, v, segments = inputs()
  options: Any = {"scale": 0.3, "segments_BT": segments if packed else None}
  options |= {"window": window, "soft_cap": soft_cap}
  got = tokamax(*map(jnp.asarray, (q, k, v)), **options)
  np.testing.assert_allclose(got, attention(q, k, v, **options), atol=2e-5)
  assert called["logits_scale"] == 0.3 and called["logits_soft_cap"] == soft_cap
  assert called["bias"] is None and called["q"].shape == (2, 128, 4, 8)
  # No mask of T x S, neither as we give it nor as the kernel takes it apart.
  assert called["mask"].bool_mask is None
  array, *_ = common.decompose_mask(called["mask"], called["q"], called["k"], None, None)
  assert array is None


def test_a_mask_means_what_it_is_taken_for():
  """The premises, each against NumPy."""
  query, key = np.mgrid[:6, :6]
  start = jnp.array([0, 0, 2, 2, 2, 5])
  mask = base.Mask(is_causal=True) & base.Mask(k_start=start)
  expected = (key <= query) & (key >= np.asarray(start)[:, None])
  np.testing.assert_array_equal(mask.as_array(6, 6)[0], expected)
  window = mask & base.CausalMask(offset=0, window_size=2)  # As api.py makes it of (1, 0).
  np.testing.assert_array_equal(window.as_array(6, 6)[0], expected & (query - key < 2))


def test_the_soft_cap_is_of_the_sum_with_the_bias():
  """So `layers.tokamax` refuses the two together: `layers.Options` caps first."""
  q = k = v = jnp.ones((1, 2, 1, 2))
  v = v.at[0, 1].set(5)
  bias = jnp.array([[[[0.0, 0.0], [0.0, 3.0]]]])
  y = library.dot_product_attention(
    q, k, v, bias, scale=1.0, is_causal=True, logits_soft_cap=2.0, implementation=("xla",)
  )
  capped = np.exp(2 * np.tanh(np.array([2.0, 5.0]) / 2))
  np.testing.assert_allclose(y[0, 1, 0, 0], capped @ [1, 5] / capped.sum(), rtol=1e-5)


def test_only_a_list_of_several_falls_back():
  q = jnp.ones((1, 128, 2, 64), jnp.bfloat16)

  def cannot(*arrays, **options):
    raise NotImplementedError("no such kernel")

  chosen: Any = (cannot, "xla")
  library.dot_product_attention(q, q, q, implementation=chosen)  # Silently, the second.
  chosen = (cannot,)
  with pytest.raises(NotImplementedError, match="no such kernel"):
    library.dot_product_attention(q, q, q, implementation=chosen)


def test_one_implementation_is_named(monkeypatch):
  """Whatever we pass, it must not be a list that falls back, or `xla` would hold T x S logits."""
  seen: list[Any] = []

  def record(*arrays: jax.Array, implementation: Any, **options: Any):
    seen.append(implementation)
    return arrays[0]

  monkeypatch.setattr(library, "dot_product_attention", record)
  q, k, v, segments = inputs()
  for ids in (None, segments):
    tokamax(*map(jnp.asarray, (q, k, v)), scale=0.3, segments_BT=ids)
  assert [len(one) for one in seen] == [1, 1] and seen[0] == ("mosaic_gpu",)
  assert "mosaic_gpu" in api.IMPLEMENTATIONS
