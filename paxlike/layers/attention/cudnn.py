# SPDX-License-Identifier: Apache-2.0
"""Attention with cuDNN's fused kernels, on NVIDIA GPUs."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import ArgumentError
from paxlike.layers.attention.kernels import AttentionOptions, refuse, segment_starts
from paxlike.layers.attention.sharded_kernel import per_device

MAX_SEGMENTS = 64  # The default limit on segments per sequence.
# Whether JAX computes the offsets of packed keys with the number of KV heads. Earlier versions use
# that of query heads (JAX pull request 39521), which is correct only if N == K.
COUNTS_KEY_HEADS = jax.__version_info__ >= (0, 12)


@configurable
def cudnn(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  max_segments: ranges.Size = MAX_SEGMENTS,
  **options: Unpack[AttentionOptions],
) -> jax.Array:
  """Flash attention for float16 and bfloat16: memory linear in T; see `Kernel`.

  Segments are runs of equal ids, at most `max_segments` per sequence; the output of a sequence with
  more is NaN, so packing must respect the limit. For packed sequences, KV heads are repeated if JAX
  computes wrong offsets (not `COUNTS_KEY_HEADS`), and values narrower than keys are padded.

  Raises:
    UserError: A soft cap, sinks or a bias is set, or cuDNN does not support the dtype or widths.
  """
  refuse(cudnn, options, "soft_cap", "sinks_N", "bias_NTS")
  if (dtype := q_BTNH.dtype) not in (jnp.bfloat16, jnp.float16):
    raise ArgumentError(f"kernel=cudnn is for bfloat16 and float16, not {dtype=!s}.")
  width, value_width = q_BTNH.shape[-1], v_BSKH.shape[-1]
  if not has_widths(width, value_width):
    raise ArgumentError(
      f"kernel=cudnn: heads of {width} with values of {value_width}; it supports"
      " multiples of 8 up to 256, and values no wider than keys."
    )

  def local(q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    return _attend(q, k, v, segments_BT, options, max_segments)

  # JAX's partitioner rejects fewer KV heads than shards and a sharded T. Gradients need an even T.
  return per_device(local, q_BTNH, k_BSKH, v_BSKH, options, "segments_BT", block=2)


def has_widths(width: int, value_width: int) -> bool:
  """Returns whether cuDNN supports these widths of keys and values."""
  return value_width <= width <= 256 and width % 8 == value_width % 8 == 0


def _attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments_BT: jax.Array | None,
  options: AttentionOptions,
  max_segments: int,
) -> jax.Array:
  # JAX's public function takes only a dense mask, with which cuDNN is slow.
  from jax._src.cudnn import fused_attention_stablehlo as library

  mask, width = library.MaskType.CAUSAL, v_BSKH.shape[-1]
  packing: dict[str, Any] = {}
  fits_B = None
  if segments_BT is not None:
    lengths, offsets, fits_B = segment_runs(segments_BT, max_segments)
    if max_segments > 1:  # With 1, a sequence is one segment, or its output is NaN.
      mask = library.MaskType.PADDING_CAUSAL
      packing = {"q_seqlen": lengths, "kv_seqlen": lengths}
      packing |= {"q_offsets": offsets, "kv_offsets": offsets}
      k_BSKH, v_BSKH = with_one_stride(q_BTNH, k_BSKH, v_BSKH)
  try:
    y_BTNH: Any = library.dot_product_attention(
      q_BTNH,
      k_BSKH,
      v_BSKH,
      scale=options["scale"],
      mask_type=mask,
      sliding_window_length=options.get("window"),
      qkv_layout="BTNH",
      **packing,
    )
  except (RuntimeError, NotImplementedError) as error:
    raise ArgumentError(f"kernel=cudnn: {error} Use xla_chunked.") from None
  y_BTNH = y_BTNH[..., :width]
  if fits_B is None:
    return y_BTNH
  return jnp.where(fits_B[:, None, None, None], y_BTNH, jnp.nan)


def segment_runs(segments_BT: jax.Array, max_runs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the runs of equal segment ids of each sequence, in JAX's format.

  Returns:
    int32 [B, max_runs], the lengths of the first runs. int32 [B, max_runs + 1], the indexes of
    their first tokens. Both are padded with -1, and the last index is -1 instead of the end of the
    last run: JAX concatenates all non-negative entries over the batch. bool [B], whether a sequence
    has at most `max_runs` runs.
  """
  T = segments_BT.shape[1]
  begins_BT = segment_starts(segments_BT)
  starts = jnp.sort(jnp.where(begins_BT, jnp.arange(T), T), axis=1)[:, : max_runs + 1]
  starts = jnp.pad(starts, ((0, 0), (0, max_runs + 1 - starts.shape[1])), constant_values=T)
  lengths = jnp.diff(starts, axis=1)
  exists = lengths > 0
  lengths = jnp.where(exists, lengths, -1).astype(jnp.int32)
  offsets = jnp.where(exists, starts[:, :-1], -1).astype(jnp.int32)
  offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
  return lengths, offsets, begins_BT.sum(1) <= max_runs


def with_one_stride(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values for which JAX computes correct offsets of packed runs.

  JAX uses one token stride for keys and values, so values are padded to the width of keys. If it
  uses the queries' stride (not `COUNTS_KEY_HEADS`), KV heads are repeated to N.
  """
  rest = q_BTNH.shape[-1] - v_BSKH.shape[-1]
  v_BSKH = jnp.pad(v_BSKH, [(0, 0)] * 3 + [(0, rest)])
  N, K = q_BTNH.shape[2], k_BSKH.shape[2]
  if N == K or COUNTS_KEY_HEADS:
    return k_BSKH, v_BSKH
  return jnp.repeat(k_BSKH, N // K, axis=2), jnp.repeat(v_BSKH, N // K, axis=2)
