# SPDX-License-Identifier: Apache-2.0
"""Attention with JAX's Pallas kernel for TPUs, which skips masked blocks ("splash")."""

import math
from typing import Any, Unpack

import jax

from paxlike.config.configurable import configurable
from paxlike.layers.attention.kernels import AttentionOptions, refuse
from paxlike.layers.attention.sharded_kernel import per_device

_LARGEST_BLOCK = 512


@configurable
def splash(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  interpret: bool = False,
  **options: Unpack[AttentionOptions],
) -> jax.Array:
  """Flash attention (FlashAttention-2; Dao, 2023): memory linear in T; see `Kernel`.

  Skips blocks that the causal mask or the window hides, but not blocks between different segments.
  The block size is the largest power of two, up to 512, that divides T. `interpret` runs on any
  backend, slowly, for tests.

  Raises:
    UserError: A bias is set.
  """
  refuse(splash, options, "bias_NTS")
  # A slow import, needed only on TPUs.
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  def local(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BT: jax.Array | None,
    sinks_N: jax.Array | None,
  ) -> jax.Array:
    kernel = _kernel(q.shape[1], q.shape[2], options, interpret=interpret)
    segments = None
    if segments_BT is not None:
      segments = library.SegmentIds(segments_BT, segments_BT)
    heads_first = [x.swapaxes(1, 2) for x in (q * options["scale"], k, v)]
    y_BNTH = jax.vmap(kernel, (0, 0, 0, 0, None))(*heads_first, segments, sinks_N)
    return y_BNTH.swapaxes(1, 2)

  return per_device(local, q_BTNH, k_BSKH, v_BSKH, options, "segments_BT", "sinks_N")


def _kernel(length: int, num_heads: int, options: AttentionOptions, *, interpret: bool) -> Any:
  """Returns the kernel for one sequence."""
  from jax.experimental.pallas.ops.tpu import splash_attention as library

  shape = (length, length)
  mask = library.CausalMask(shape)
  if (window := options.get("window")) is not None:
    mask = library.LocalMask(shape, window_size=(window - 1, 0), offset=0)
  size = block_size(length)
  sizes = library.BlockSizes(
    block_q=size,
    block_kv=size,
    block_q_dkv=size,
    block_kv_dkv=size,
    block_q_dq=size,
    block_kv_dq=size,
  )
  return library.make_splash_mha(
    library.MultiHeadMask([mask] * num_heads),
    block_sizes=sizes,
    attn_logits_soft_cap=options.get("soft_cap"),
    head_shards=1,
    q_seq_shards=1,
    interpret=interpret,
  )


def block_size(length: int) -> int:
  """Returns the block size: the largest power of two, up to 512, that divides `length`."""
  return math.gcd(length, _LARGEST_BLOCK)
