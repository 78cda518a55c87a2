# SPDX-License-Identifier: Apache-2.0
"""What JAX and cuDNN mean by the arguments of packed attention, and that we pass that.

- JAX, `jax/_src/cudnn/fused_attention_stablehlo.py` of 0.10.2 and 0.12.0.1, the docstring of
  `dot_product_attention`: lengths are [B, M], offsets [B, M + 1], the start of each segment within
  its sequence, filled up with -1; two sequences of three and two segments of one token have the
  offsets [[0, 1, 2, -1], [0, 1, -1, -1]]. `_fix_seqlen_offsets` joins all that is not negative over
  the batch and multiplies it by heads x width; of keys, 0.10.2 takes the queries' heads.
- cuDNN, "Ragged Layout" of cudnn-frontend's docs/operations/Attention.md: a segment is `length`
  tokens from an offset that counts elements, one array of offsets for queries and outputs and, as
  XLA calls it, one for keys and values.
- `sliding_window_length=w`: a token sees itself and the w - 1 before it.

The test runs JAX's own code up to the call of the kernel, and puts NumPy in the kernel's place.
"""

import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.layers import cudnn
from paxlike.layers.attention import cudnn as cudnn_attention
from paxlike.layers.attention import kernels

library = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
SIGNATURE = inspect.signature(library._dot_product_attention)
T, WIDTH = 32, 16


def tokens_at(flat, offset, length, heads, width):
  """[length, heads, width] from an offset on, NaN behind the end of the array."""
  part = flat[offset : offset + length * heads * width]
  missing = length * heads * width - len(part)
  return np.concatenate([part, np.full(missing, np.nan)]).reshape(length, heads, width)


def one_segment(q_TNH, k_TKH, v_TKH, scale, window):
  repeats = q_TNH.shape[1] // k_TKH.shape[1]
  k_TNH, v_TNH = (np.repeat(x, repeats, axis=1) for x in (k_TKH, v_TKH))
  logits = np.einsum("TNH,SNH->NTS", q_TNH, k_TNH) * scale
  distance = np.arange(len(q_TNH))[:, None] - np.arange(len(q_TNH))
  logits = np.where((distance >= 0) & (distance < (window or T)), logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  return np.einsum("NTS,SNH->TNH", weights / weights.sum(-1, keepdims=True), v_TNH)


def kernel_of_cudnn(*args):
  """Stands for JAX's `_dot_product_attention`: what cuDNN computes of what it would be given."""
  told = SIGNATURE.bind(*args).arguments
  names = ("query", "key", "value")
  q, k, v = (np.asarray(told[name].astype(jnp.float32)) for name in names)
  packing = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets")
  assert told["mask_type"] is library.MaskType.PADDING_CAUSAL
  library.check_layout(
    *(told[name] for name in names), None, *(told[name] for name in packing), None, None,
    library.AttentionLayout.BTNH,
  )  # fmt: skip
  fixed = library._fix_seqlen_offsets(
    *(told[name] for name in packing), *(told[n] for n in names[:2])
  )
  q_lengths, k_lengths, q_offsets, k_offsets = (np.asarray(x).ravel() for x in fixed)
  num_segments = told["q_seqlen"].size  # The batch that cuDNN sees.
  (_, _, N, H), (_, _, K, V) = q.shape, v.shape
  y = np.full((*q.shape[:3], V), np.nan, np.float32).ravel()
  for number in range(num_segments):
    length, start = q_lengths[number], q_offsets[number]
    if length <= 0:
      continue
    assert k_lengths[number] == length
    q_TNH = tokens_at(q.ravel(), start, length, N, H)
    k_TKH = tokens_at(k.ravel(), k_offsets[number], length, K, H)
    v_TKH = tokens_at(v.ravel(), k_offsets[number], length, K, V)
    found = one_segment(q_TNH, k_TKH, v_TKH, told["scale"], told["sliding_window_length"])
    room = max(0, min(found.size, y.size - start))
    y[start : start + room] = found.ravel()[:room]
  return jnp.asarray(y.reshape(*q.shape[:3], V), told["query"].dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("most", "window"), [(8, None), (4, 5), (3, None), (1, 5)])
@pytest.mark.parametrize("value_width", [WIDTH, 8])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 4])
def test_each_token_attends_within_its_segment(
  h200, monkeypatch, batch, kv_heads, value_width, most, window
):
  """Sequences of more segments than there is room for are NaN as a whole, and disturb no other."""
  random = np.random.default_rng(0)
  shapes = [(batch, T, 4, WIDTH), (batch, T, kv_heads, WIDTH), (batch, T, kv_heads, value_width)]
  q, k, v = (jnp.array(random.normal(size=shape), jnp.bfloat16) for shape in shapes)
  counts = [min(3, most)] if batch == 1 else [*random.permutation([3, 1, 4, 2])]
  bounds = [np.sort(random.choice(np.arange(1, T), count - 1, replace=False)) for count in counts]
  segments = np.stack([np.searchsorted(bound, np.arange(T), "right") for bound in bounds])
  options = {"scale": 0.3, "segments_BT": jnp.array(segments, jnp.int32), "window": window}
  expected = kernels.xla(*(x.astype(jnp.float32) for x in (q, k, v)), **options)
  monkeypatch.setattr(library, "_dot_product_attention", kernel_of_cudnn)
  if most == 1:  # Then there is nothing to pack.
    monkeypatch.setattr(library, "_dot_product_attention", whole_sequences)
  found = np.asarray(cudnn(q, k, v, max_segments=most, **options).astype(jnp.float32))
  fits = np.array(counts) <= most
  np.testing.assert_allclose(found[fits], expected[fits], atol=2e-2)
  assert np.isnan(found[~fits]).all()


def whole_sequences(*args):
  told = SIGNATURE.bind(*args).arguments
  assert told["mask_type"] is library.MaskType.CAUSAL and not told["q_offsets"].size
  q, k, v = (told[name] for name in ("query", "key", "value"))
  window = told["sliding_window_length"]
  return kernels.xla(q, k, v, scale=told["scale"], segments_BT=None, window=window)


def test_offsets_are_those_of_the_docstring():
  """Its example, with a token in no third segment: there all are of one token."""
  segments = jnp.array([[1, 2, 3], [1, 2, 2]])
  lengths, offsets, fits = cudnn_attention.segment_runs(segments, 3)
  assert offsets.tolist() == [[0, 1, 2, -1], [0, 1, -1, -1]]
  assert lengths.tolist() == [[1, 1, 1], [1, 2, -1]]
  assert fits.all()


def test_keys_are_repeated_only_where_jax_would_miss_them(h200, monkeypatch):
  seen = []
  monkeypatch.setattr(
    library, "_dot_product_attention", lambda *args: seen.append(args[1].shape[2]) or args[0]
  )
  q, k = jnp.ones((2, 8, 4, 8), jnp.bfloat16), jnp.ones((2, 8, 2, 8), jnp.bfloat16)
  for segments in (None, jnp.ones((2, 8), jnp.int32)):
    cudnn(q, k, k, scale=1.0, segments_BT=segments)
  lengths, offsets = jnp.array([[1, 1]], jnp.int32), jnp.array([[0, 1, -1]], jnp.int32)
  heads = [jnp.zeros((1, 2, count, 1)) for count in (2, 1)]
  told = library._fix_seqlen_offsets(lengths, lengths, offsets, offsets, *heads)
  counts = told[3][0, 1] == 1
  assert seen == [2, 2 if counts else 4]
