# SPDX-License-Identifier: Apache-2.0
"""Token and position embeddings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers import module
from paxlike.layers.linear import flatten_tokens
from paxlike.layers.lora import EmbeddingLora
from paxlike.layers.precision import cpu_dots, float32_sums
from paxlike.layers.precision.matmul import matmul


@configurable
class Embedding(module.Module):
  """Token embedding, which may also serve as the output projection (Press and Wolf, 2017)."""

  def __init__(
    self,
    vocab_size: ranges.Size,
    dim: ranges.Size,
    is_head: bool,
    *,
    init: module.Initializer,
    scale: ranges.Finite = 1.0,
    logits_scale: ranges.Finite = 1.0,
    dtype: ranges.ComputeDtype = jnp.float32,
    lora: Callable[[int, int], EmbeddingLora] | None = None,
  ):
    """Builds the layer.

    Args:
      vocab_size: V.
      dim: D.
      is_head: Whether it also serves as the output projection; see `attend`.
      init: The initializer.
      scale: Multiplies the embedded tokens.
      logits_scale: Multiplies the logits.
      dtype: The compute dtype.
      lora: Low-rank adapter of the table, trained while the table is frozen.
    """
    self.scale = scale
    self.logits_scale = logits_scale
    self.dtype = dtype
    self.table = self.weight(
      {"vocab": vocab_size, "model": dim},
      init=init,
      fan_in=("model",),
      matmul=module.Matmul(dim, vocab_size) if is_head else None,
      compute_dtype=dtype,
    )
    self.lora = None if lora is None else lora(vocab_size, dim)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Returns [..., D] for int32 tokens [...]; ids must lie in [0, vocab_size)."""
    x: Any = float32_sums.lookup(self.table[...].astype(self.dtype), tokens, ("vocab", "model"))
    if self.lora is not None:
      x += self.lora(tokens)
    return x if self.scale == 1 else x * jnp.asarray(self.scale, self.dtype)

  def attend(self, x: jax.Array) -> jax.Array:
    """Returns logits [..., V] for x [..., D]."""
    tokens = flatten_tokens(x.astype(self.dtype))
    logits: Any = self._logits(tokens, self.table[...].astype(self.dtype))
    if self.lora is not None:
      logits += self.lora.attend(tokens)
    logits = logits.reshape(*x.shape[:-1], -1)
    return logits if self.logits_scale == 1 else logits * self.logits_scale

  def _logits(self, tokens: jax.Array, table_VD: jax.Array) -> jax.Array:
    if self.dtype != jnp.bfloat16 or tokens.ndim != 2 or not cpu_dots.on_cpu():
      return matmul(tokens, table_VD.T)
    return cpu_dots.dot_of_columns(tokens, table_VD)


@configurable
class PositionEmbedding(module.Module):
  """A learned vector for each of `max_len` positions."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    max_len: ranges.Size,
    init: module.Initializer,
    dtype: ranges.ComputeDtype = jnp.float32,
  ):
    self.dtype = dtype
    self.table = self.weight({"position": max_len, "model": dim}, init=init, compute_dtype=dtype)

  def __call__(self, num_tokens: int, positions_BT: jax.Array | None) -> jax.Array:
    """Returns [T, D] for positions 0 to T - 1, or [B, T, D] for explicit ones."""
    table = self.table[...].astype(self.dtype)
    if positions_BT is None:
      return table[:num_tokens]
    return float32_sums.lookup(table, positions_BT, ("position", "model"))
