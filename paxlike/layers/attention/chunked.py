# SPDX-License-Identifier: Apache-2.0
"""Attention one chunk of queries at a time: memory linear in T, on any backend."""

import itertools
import math
from collections.abc import Callable
from typing import Any, Unpack

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

  def chunk(start: jax.Array, size: int, span: tuple[int, int]) -> jax.Array:
    first_key = first_seen(span[0], options.get("window"))
    k, v = k_BSKH[:, first_key : span[1]], v_BSKH[:, first_key : span[1]]
    q = jax.lax.dynamic_slice_in_dim(q_BTNH, start, size, 1)
    return attend_slice(q, k, v, first_query=start, first_key=first_key, **options)

  return over_queries(chunk, q_BTNH.shape[1])


def over_queries(
  compute: Callable[[jax.Array, int, tuple[int, int]], Any],
  length: int,
  *,
  most: int = _CHUNK,
  num_spans: int = _SPANS,
) -> Any:
  """Returns `compute` of all queries, a chunk at a time; the backward pass computes it again.

  Args:
    compute: (first query, number of queries, span) -> pytree of [B, number, ...]. The span is the
      (first, end) of the queries of several chunks, which are not traced.
    length: T.
    most: Queries of a chunk, at most.
    num_spans: The number of spans.
  """
  size = math.ceil(length / math.ceil(length / most))
  num_chunks = math.ceil(length / size)
  last = length - size  # The start of the last chunk, which ends at the end of the sequence.

  def of_span(first: int, end: int) -> Any:
    """Returns the results of chunks [first, end)."""
    span = min(first * size, last), min(end * size, length)

    @jax.checkpoint
    def chunk(number: jax.Array) -> Any:
      return compute(jnp.minimum(number * size, last), size, span)

    chunks = jax.lax.map(chunk, jnp.arange(first, end))
    return jax.tree.map(
      lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:]), chunks
    )

  def joined(*spans: jax.Array) -> jax.Array:
    x = jnp.concatenate(spans, axis=1)
    if num_chunks * size == length:
      return x
    return jnp.concatenate([x[:, :last], x[:, -size:]], axis=1)

  bounds = [num_chunks * number // num_spans for number in range(num_spans + 1)]
  spans = [of_span(first, end) for first, end in itertools.pairwise(bounds) if first < end]
  return jax.tree.map(joined, *spans)
