# SPDX-License-Identifier: Apache-2.0
"""What splash attention means by its arguments, and that `layers.splash` passes that.

Callee: jax/experimental/pallas/ops/tpu/splash_attention/ of JAX 0.10.2 and 0.12.0.
- splash_attention_mask.py, `LocalMask`: key j is visible to query i if i + offset - left <= j <= i
  + offset + right: both sides are inclusive, and a window of w tokens is (w - 1, 0). Masks are 2-D;
  `MultiHeadMask` takes one for each *query* head, and raises if their shapes differ.
- splash_attention_kernel.py, `SegmentIds`: equal ids attend to each other, *and* the static mask;
  there is no id for padding, and a query that sees no key divides by zero.
- `_attention_reference_default`: logits are q . k, unscaled; then cap * tanh(logits / cap); a sink
  is the logit of one more key without value. `make_attention_reference`: query heads [0, N / K)
  read key head 0.
- `_splash_attention_forward`: q [N, T, H], k [K, S, H], v [K, S, Hv] of one sequence, `SegmentIds`
  of [T] and [S], sinks [N]; output in q's dtype. The compute block of keys must be a multiple of
  128 lanes; grids are length // block, so a block that does not divide the length would leave
  tokens out silently.
- `BlockSizes`: without those of the backward pass there is no gradient. `block_kv_compute` is
  `block_kv` unless given.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from contracts.plain_attention import attention
from jax.experimental.pallas.ops.tpu import splash_attention as library
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

from paxlike.layers import splash


class Called:
  """Stands for `make_splash_mha`: the callee's own reference, and a record of the arguments."""

  def __init__(self):
    self.arguments: dict[str, Any] = {}
    self.operands: list[Any] = []

  def make(self, mask, **arguments):
    self.arguments = {"mask": mask, **arguments}
    reference = kernels.make_masked_mha_reference(mask)

    def call(q_NTH, k_KSH, v_KSH, segments, sinks_N):
      self.operands = [q_NTH, k_KSH, v_KSH, segments, sinks_N]
      cap = arguments["attn_logits_soft_cap"]
      return reference(q_NTH, k_KSH, v_KSH, segments, sinks_N, attn_logits_soft_cap=cap)

    return call


@pytest.fixture
def called(monkeypatch):
  record = Called()
  monkeypatch.setattr(library, "make_splash_mha", record.make)
  return record


def inputs(length: int, heads: int = 4, kv_heads: int = 2, value_width: int = 8) -> Any:
  random = np.random.default_rng(0)
  q = random.normal(size=(2, length, heads, 8)).astype(np.float32)
  k = random.normal(size=(2, length, kv_heads, 8)).astype(np.float32)
  v = random.normal(size=(2, length, kv_heads, value_width)).astype(np.float32)
  segments = np.sort(random.integers(0, 4, (2, length))).astype(np.int32)
  return q, k, v, segments


@pytest.mark.parametrize(
  ("sizes", "packed", "options"),
  [
    ({}, False, {}),
    ({"kv_heads": 4, "value_width": 4}, True, {}),
    ({}, True, {"window": 1}),
    ({}, True, {"window": 9, "soft_cap": 1.5}),
    ({"kv_heads": 1}, False, {"window": 70, "sinks_N": np.array([-1.0, 0.0, 1.0, 2.0])}),
  ],
  ids=["grouped", "packed, narrow values", "only itself", "window and soft cap", "sinks, one key"],
)
def test_by_the_callees_reference_it_is_causal_attention(called, sizes, packed, options):
  q, k, v, segments = inputs(70, **sizes)
  options = {"scale": 0.3, "segments_BT": segments if packed else None, **options}
  got = splash(*map(jnp.asarray, (q, k, v)), **options)
  np.testing.assert_allclose(got, attention(q, k, v, **options), atol=2e-5)


def test_the_reference_scales_nothing_and_counts_keys_on_both_sides():
  """The premises: were one of them wrong, so would be the test above."""
  mask = library.MultiHeadMask([library.LocalMask((6, 6), (2, 1), offset=0)] * 2)
  place = np.arange(6)
  distance = place[:, None] - place
  np.testing.assert_array_equal(mask[:, :, :][1], (distance <= 2) & (distance >= -1))
  q = np.full((2, 6, 4), 3.0, np.float32)
  k = np.ones((1, 6, 4), np.float32) * place[:, None].astype(np.float32) / 12
  v = np.repeat(np.eye(6, dtype=np.float32)[None], 1, axis=0)
  weights = np.exp(place / 1.0) * np.asarray(mask[:, :, :][0])
  got = kernels.make_masked_mha_reference(mask)(q, k, v)
  np.testing.assert_allclose(got[0], weights / weights.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("length", [1, 128, 200, 640, 2048])
@pytest.mark.parametrize("window", [None, 100])
def test_masks_blocks_and_layout_are_of_whole_lanes(called, length, window):
  q, k, v, segments = inputs(length, heads=4, kv_heads=2)
  arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
  splash(*arrays, scale=0.3, segments_BT=segments, window=window)
  padded = -(-length // 128) * 128
  assert called.arguments["mask"].shape == (4, padded, padded)
  assert called.arguments["head_shards"] == called.arguments["q_seq_shards"] == 1
  sizes = called.arguments["block_sizes"]
  assert sizes.has_backward_blocks and sizes.block_kv_compute == sizes.block_kv
  for name in ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"):
    size = getattr(sizes, name)
    assert size % kernels.NUM_LANES == 0 and padded % size == 0, name
  layout = kernels.QKVLayout.HEAD_DIM_MINOR
  assert {sizes.q_layout, sizes.k_layout, sizes.v_layout} == {layout}
  q_NTH, k_KSH, v_KSH, ids, sinks = called.operands
  assert (q_NTH.shape, k_KSH.shape, v_KSH.shape) == (
    (4, padded, 8),
    (2, padded, 8),
    (2, padded, 8),
  )
  assert {x.dtype for x in (q_NTH, k_KSH, v_KSH)} == {jnp.dtype("bfloat16")}
  assert ids.q.shape == ids.kv.shape == (padded,) and sinks is None


def test_no_query_is_left_without_a_key(called):
  """Also where a sequence is filled up: its last segment goes on, for there is no id of padding."""
  q, k, v, segments = inputs(70)
  y = splash(*map(jnp.asarray, (q, k, v)), scale=0.3, segments_BT=segments, window=1)
  assert np.isfinite(y).all()
  # Each token sees itself, so filled-up ones too.
  assert np.diagonal(called.arguments["mask"][:, :, :], axis1=1, axis2=2).all()


def test_it_takes_what_the_callee_takes():
  """A sequence of 129 in one block of 128 would lose a token: the callee does not refuse it."""
  with pytest.raises(ValueError, match="multiple of 128"):
    _run(block=64, length=128)
  sizes = library.BlockSizes(block_q=128, block_kv=128)
  assert not sizes.has_backward_blocks


def _run(*, block: int, length: int):
  mask = library.MultiHeadMask([library.CausalMask((length, length))])
  sizes = library.BlockSizes(block_q=block, block_kv=block)
  kernel = library.make_splash_mha(
    mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=True
  )
  x = jnp.ones((1, length, 8))
  return kernel(x, x, x)
