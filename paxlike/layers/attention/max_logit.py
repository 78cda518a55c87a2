# SPDX-License-Identifier: Apache-2.0
"""The largest attention logits of a layer and its heads: exact, for every kernel.

Flash kernels do not return logits, so the logits are computed here, a block at a time. XLA merges
them with those of the kernel `xla`.
"""

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from paxlike.devices import mesh
from paxlike.layers.attention.kernels import AttentionOptions, masked_logits, spans
from paxlike.layers.aux_losses import Aux, none
from paxlike.layers.call_context import Context

_MOST_LOGITS = 2**26  # Per device, that are materialized at a time.


def logged(
  context: Context, q_BTNH: jax.Array, k_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> Aux:
  """Returns the layer metric `max_attention_logit`, if `context.log_layers`."""
  return metric(max_logits(q_BTNH, k_BSKH, **options)) if context.log_layers else none()


def metric(largest_N: jax.Array) -> Aux:
  """Returns the layer metric of the largest logits of heads."""
  value = jnp.stack([largest_N.max(), jnp.ones(())])
  return none()._replace(layer_maxima={"max_attention_logit": value})


def max_logits(
  q_BTNH: jax.Array, k_BSKH: jax.Array, **options: Unpack[AttentionOptions]
) -> jax.Array:
  """Returns [N], the largest logit of a query and a key that it attends to; at least 0.

  The logits are those that enter the softmax: scaled, capped and biased. Sinks do not count. There
  is no gradient.
  """
  given: Any = {name: option for name, option in options.items() if name != "sinks_N"}
  q_BTNH, k_BSKH = jax.lax.stop_gradient((q_BTNH, k_BSKH))
  given["bias_NTS"] = jax.lax.stop_gradient(given.get("bias_NTS"))
  # Queries may stay sharded over T: blocks are of keys.
  k_BSKH = mesh.constrain(k_BSKH, "batch", None, "kv_heads", None)
  largest = jnp.zeros(q_BTNH.shape[2])
  for first, end, first_key in spans(q_BTNH.shape[1], options.get("window")):
    q, k = q_BTNH[:, first:end], k_BSKH[:, first_key:end]
    largest = jnp.maximum(largest, _of_span(q, k, first_query=first, first_key=first_key, **given))
  return largest


def _of_span(q_BTNH: jax.Array, k_BSKH: jax.Array, *, first_key: int, **options: Any) -> jax.Array:
  """Returns [N], the largest logits of a span of queries and their keys."""
  S = k_BSKH.shape[1]
  sizes = dict.fromkeys(mesh.AXES, 1) | mesh.sizes_here(mesh.AXES)
  spec = mesh.partition(("batch", "time", "heads", None), q_BTNH.shape, sizes)
  num_shards = math.prod(sizes[axis] for axis in mesh.axes_of(spec))
  num_queries = math.prod(q_BTNH.shape[:3]) // num_shards
  num_blocks = math.ceil(S / max(1, _MOST_LOGITS // num_queries))

  def of_heads(logits_BKGTS: jax.Array) -> jax.Array:
    return logits_BKGTS.max((0, 3, 4)).reshape(-1)

  if num_blocks == 1:
    return of_heads(masked_logits(q_BTNH, k_BSKH, first_key=first_key, **options))
  size = math.ceil(S / num_blocks)

  def block(number: jax.Array) -> jax.Array:
    start = jnp.minimum(number * size, S - size)  # The last block overlaps the one before.
    k = jax.lax.dynamic_slice_in_dim(k_BSKH, start, size, 1)
    return of_heads(masked_logits(q_BTNH, k, first_key=first_key + start, **options))

  return jax.lax.map(block, jnp.arange(num_blocks)).max(0)
