# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's fused kernels, on NVIDIA GPUs."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.attention_kernels import Options, begins, refuse
from paxlike.layers.per_device import per_device

MAX_SEGMENTS = 64  # Of a sequence, where nothing else is said.
# Before, JAX multiplies the offsets of packed keys by the heads of the queries (JAX's pull request
# 39521), which is right only where keys have as many heads.
COUNTS_KEY_HEADS = jax.__version_info__ >= (0, 12)


@configurable
def cudnn(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  max_segments: ranges.Size = MAX_SEGMENTS,
  **options: Unpack[Options],
) -> jax.Array:
  """Attention in memory linear in the length, for float16 and bfloat16; see `Kernel`.

  Segments are runs of equal ids. The kernel has room for `max_segments` a sequence; a sequence of
  more becomes NaN, so whoever packs sequences has to keep to it. Packed keys of fewer heads than
  the queries are repeated where JAX would misplace them (`COUNTS_KEY_HEADS`), and packed values
  narrower than the keys are padded.

  Raises:
    UserError: There is a soft cap, sinks or a bias, or cuDNN does not have the dtype or the widths.
  """
  refuse("cudnn", options, "soft_cap", "sinks_N", "bias_NTS")
  if (dtype := q_BTNH.dtype) not in (jnp.bfloat16, jnp.float16):
    raise UserError(f"ATTENTION_KERNEL=cudnn is for bfloat16 and float16, not FPROP_DTYPE={dtype}.")
  width, value_width = q_BTNH.shape[-1], v_BSKH.shape[-1]
  if not has_widths(width, value_width):
    raise UserError(
      f"ATTENTION_KERNEL=cudnn: heads of {width} with values of {value_width}; it has multiples of"
      " 8 to 256, and values no wider than keys."
    )

  def local(q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    return _attend(q, k, v, segments_BT, options, max_segments)

  # JAX's own partitioner refuses fewer keys than devices that share heads, and shared tokens; and
  # it gives no gradient of an odd number of tokens.
  return per_device(local, q_BTNH, k_BSKH, v_BSKH, options, "segments_BT", block=2)


def has_widths(width: int, value_width: int) -> bool:
  """Returns whether it attends with heads whose keys and values are so wide."""
  return value_width <= width <= 256 and width % 8 == value_width % 8 == 0


def _attend(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  segments_BT: jax.Array | None,
  options: Options,
  max_segments: int,
) -> jax.Array:
  # The public function knows of a mask only, with which cuDNN is slow.
  from jax._src.cudnn import fused_attention_stablehlo as library

  mask, width = library.MaskType.CAUSAL, v_BSKH.shape[-1]
  packing: dict[str, Any] = {}
  fits_B = None
  if segments_BT is not None:
    lengths, offsets, fits_B = runs(segments_BT, max_segments)
    if max_segments > 1:  # Else those sequences that are no NaN are one segment each.
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
    raise UserError(f"ATTENTION_KERNEL=cudnn: {error} Take xla_chunked.") from None
  y_BTNH = y_BTNH[..., :width]
  if fits_B is None:
    return y_BTNH
  return jnp.where(fits_B[:, None, None, None], y_BTNH, jnp.nan)


def runs(segments_BT: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns where the runs of equal ids of each sequence lie, in the form that JAX expects.

  Returns:
    int32 [B, most], the lengths of the first `most` runs. int32 [B, most + 1], their first tokens,
    without the end of the last: JAX joins over the batch all that is not negative. Both are filled
    up with -1. bool [B], whether a sequence has no more runs than these.
  """
  T = segments_BT.shape[1]
  begins_BT = begins(segments_BT)
  starts = jnp.sort(jnp.where(begins_BT, jnp.arange(T), T), axis=1)[:, : most + 1]
  starts = jnp.pad(starts, ((0, 0), (0, most + 1 - starts.shape[1])), constant_values=T)
  lengths = jnp.diff(starts, axis=1)
  exists = lengths > 0
  lengths = jnp.where(exists, lengths, -1).astype(jnp.int32)
  offsets = jnp.where(exists, starts[:, :-1], -1).astype(jnp.int32)
  offsets = jnp.pad(offsets, ((0, 0), (0, 1)), constant_values=-1)
  return lengths, offsets, begins_BT.sum(1) <= most


def with_one_stride(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns keys and values in which JAX finds packed runs.

  It takes one distance from token to token for keys and values, so values are padded to the width
  of keys. Where that is the queries' (`COUNTS_KEY_HEADS`), both get as many heads as those.
  """
  rest = q_BTNH.shape[-1] - v_BSKH.shape[-1]
  v_BSKH = jnp.pad(v_BSKH, [(0, 0)] * 3 + [(0, rest)])
  N, K = q_BTNH.shape[2], k_BSKH.shape[2]
  if N == K or COUNTS_KEY_HEADS:
    return k_BSKH, v_BSKH
  return jnp.repeat(k_BSKH, N // K, axis=2), jnp.repeat(v_BSKH, N // K, axis=2)
