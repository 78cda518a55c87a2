# SPDX-License-Identifier: Apache-2.0
"""Attention by cuDNN's fused kernels, on NVIDIA GPUs."""

from typing import Any, Unpack

import jax
import jax.numpy as jnp

from paxlike.errors import UserError
from paxlike.layers.attention_kernels import Options, begins, refuse
from paxlike.layers.per_device import per_device


def cudnn(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  max_segments: int = 64,
  **options: Unpack[Options],
) -> jax.Array:
  """Attention in memory linear in the length, for float16 and bfloat16; see `Kernel`.

  Segments are runs of equal ids. A row of more than `max_segments` of them becomes NaN: the kernel
  has room for so many, so whoever makes rows has to keep to it.

  Raises:
    UserError: There is a soft cap, sinks or a bias, or heads or dtype are not to cuDNN's taste.
  """
  refuse("cudnn", options, "soft_cap", "sinks_N", "bias_NTS")
  if (dtype := q_BTNH.dtype) not in (jnp.bfloat16, jnp.float16):
    raise UserError(f"ATTENTION_KERNEL=cudnn is for bfloat16 and float16, not FPROP_DTYPE={dtype}.")
  if (head_dim := q_BTNH.shape[-1]) > 256 or head_dim % 8:
    raise UserError(f"ATTENTION_KERNEL=cudnn: heads of {head_dim}; it has multiples of 8 to 256.")

  def local(q: jax.Array, k: jax.Array, v: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    return _attend(q, k, v, segments_BT, options, max_segments)

  # JAX's own partitioner refuses fewer keys than devices that share heads, and shared tokens; and
  # it gives no gradient of an odd number of tokens.
  return per_device(local, q_BTNH, k_BSKH, v_BSKH, options, "segments_BT", block=2)


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

  mask = library.MaskType.CAUSAL
  packing: dict[str, Any] = {}
  fits_B = None
  if segments_BT is not None:
    mask = library.MaskType.PADDING_CAUSAL
    lengths, offsets, fits_B = runs(segments_BT, max_segments)
    packing = {"q_seqlen": lengths, "kv_seqlen": lengths}
    packing |= {"q_offsets": offsets, "kv_offsets": offsets}
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
  if fits_B is None:
    return y_BTNH
  return jnp.where(fits_B[:, None, None, None], y_BTNH, jnp.nan)


def runs(segments_BT: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns where runs of equal ids lie, and whether there are at most so many.

  Returns:
    int32 [B, most], their lengths; int32 [B, most + 1], where they begin and the last ends; both
    with -1 where there are fewer. bool [B].
  """
  T = segments_BT.shape[1]
  places = jnp.arange(T)
  begins_BT = begins(segments_BT)
  starts = jnp.sort(jnp.where(begins_BT, places, T), axis=1)[:, : most + 1]
  starts = jnp.pad(starts, ((0, 0), (0, most + 1 - starts.shape[1])), constant_values=T)
  lengths = jnp.diff(starts, axis=1)
  ends_before = jnp.pad(starts[:, :-1], ((0, 0), (1, 0)), constant_values=0) == T
  offsets = jnp.where(ends_before, -1, starts)
  lengths = jnp.where(lengths == 0, -1, lengths)
  return lengths.astype(jnp.int32), offsets.astype(jnp.int32), begins_BT.sum(1) <= most
