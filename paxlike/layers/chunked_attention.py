# SPDX-License-Identifier: Apache-2.0
"""Attention a part of the queries at a time: memory linear in the length, on any backend."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from paxlike.layers.attention_kernels import attend

_CHUNK = 256  # Queries of which logits are held.
_SPANS = 8  # Parts of a row that each see only the keys up to their end.


def xla_chunked(
  q_BTNH: jax.Array,
  k_BSKH: jax.Array,
  v_BSKH: jax.Array,
  *,
  scale: float,
  segments_BT: jax.Array | None,
  window: int | None = None,
  soft_cap: float | None = None,
  sinks_N: jax.Array | None = None,
  bias_NTS: jax.Array | None = None,
) -> jax.Array:
  """Attention as plain XLA operations; see `Kernel`. The backward pass computes logits again.

  Holds the logits of 256 queries (Rabe and Staats, 2021). Of what the causal mask or the window
  hides, most is not computed.
  """
  length = q_BTNH.shape[1]
  size = math.ceil(length / math.ceil(length / _CHUNK))
  num_chunks = math.ceil(length / size)
  attend_ = jax.checkpoint(
    functools.partial(attend, scale=scale, window=window, soft_cap=soft_cap, sinks_N=sinks_N)
  )

  def span(first: int, last: int) -> jax.Array:
    """Returns the output of chunks [first, last)."""
    begin = 0 if window is None else max(min(first * size, length - size) - window + 1, 0)
    end = min(last * size, length)
    keys = jnp.arange(begin, end)

    def chunk(number: jax.Array) -> jax.Array:
      # The last chunk is moved back so that it ends with the row.
      start = jnp.minimum(number * size, length - size)

      def cut(x: jax.Array, axis: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

      segments = segments_BT
      return attend_(
        cut(q_BTNH, 1),
        k_BSKH[:, begin:end],
        v_BSKH[:, begin:end],
        start + jnp.arange(size),
        keys,
        segments=None if segments is None else (cut(segments, 1), segments[:, begin:end]),
        bias_NTS=None if bias_NTS is None else cut(bias_NTS[:, :, begin:end], 1),
      )

    return _joined(jax.lax.map(chunk, jnp.arange(first, last)))

  bounds = [num_chunks * part // _SPANS for part in range(_SPANS + 1)]
  spans = [(a, b) for a, b in itertools.pairwise(bounds) if a < b]
  y_BTNH = jnp.concatenate([span(*each) for each in spans], axis=1)
  if num_chunks * size == length:
    return y_BTNH
  return jnp.concatenate([y_BTNH[:, : length - size], y_BTNH[:, -size:]], axis=1)


def _joined(chunks: jax.Array) -> jax.Array:
  """Turns [chunks, B, size, N, H] into [B, chunks * size, N, H]."""
  return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1, *chunks.shape[3:])
