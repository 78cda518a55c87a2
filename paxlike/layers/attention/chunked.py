# SPDX-License-Identifier: Apache-2.0
"""Attention one chunk of queries at a time: memory linear in T, on any backend."""

import itertools
import math
from typing import Unpack

import jax
import jax.numpy as jnp

from paxlike.config.configurable import configurable
from paxlike.layers.attention.kernels import AttentionOptions, attend_slice, first_seen

_CHUNK = 256  # Queries whose logits are materialized at a time.
_SPANS = 8  # Spans of a sequence; each attends only to the keys up to its end.


@configurable
def xla_chunked(
  q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
  """Attention as plain XLA operations; see `Kernel`. The backward pass recomputes the logits.

  Materializes the logits of 256 queries at a time (Rabe and Staats, 2021), and skips most of those
  that the causal mask or the window hides.
  """
  length, window = q_BTNH.shape[1], options.get("window")
  size = math.ceil(length / math.ceil(length / _CHUNK))
  num_chunks = math.ceil(length / size)
  last = length - size  # The start of the last chunk, which ends at the end of the sequence.

  def span(first: int, end: int) -> jax.Array:
    """Returns the output of chunks [first, end)."""
    first_key = first_seen(min(first * size, last), window)
    keys = slice(first_key, min(end * size, length))

    @jax.checkpoint
    def chunk(number: jax.Array) -> jax.Array:
      start = jnp.minimum(number * size, last)
      q = jax.lax.dynamic_slice_in_dim(q_BTNH, start, size, 1)
      return attend_slice(
        q, k_BSKH[:, keys], v_BSKH[:, keys], first_query=start, first_key=first_key, **options
      )

    chunks = jax.lax.map(chunk, jnp.arange(first, end))
    return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1, *chunks.shape[3:])

  bounds = [num_chunks * number // _SPANS for number in range(_SPANS + 1)]
  spans = [span(first, end) for first, end in itertools.pairwise(bounds) if first < end]
  y_BTNH = jnp.concatenate(spans, axis=1)
  if num_chunks * size == length:
    return y_BTNH
  return jnp.concatenate([y_BTNH[:, :last], y_BTNH[:, -size:]], axis=1)
