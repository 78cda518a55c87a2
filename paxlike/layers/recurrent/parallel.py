# SPDX-License-Identifier: Apache-2.0
"""Attention and a layer with a recurrent state, side by side (Falcon-H1; arXiv:2507.22448)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.layers.aux_losses import Aux, add
from paxlike.layers.call_context import Context
from paxlike.layers.module import Module
from paxlike.layers.recurrent.cache import RecurrentCache
from paxlike.layers.recurrent.mixer import RecurrentMixer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelCache:
  """The caches of both layers."""

  attention: Any
  recurrent: RecurrentCache

  def grown(self, num_slots: int) -> "ParallelCache":
    """See `KvCache.grown`."""
    return dataclasses.replace(self, attention=self.attention.grown(num_slots))


@configurable
class ParallelMixer(Module):
  """The sum of attention and a layer with a recurrent state, both of the same input."""

  def __init__(
    self,
    dim: ranges.Size,
    *,
    attention: Callable[[int], Any],
    recurrent: Callable[[int], RecurrentMixer],
  ):
    self.attention = attention(dim)
    self.recurrent = recurrent(dim)

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: ParallelCache | None = None
  ) -> tuple[jax.Array, ParallelCache | None, Aux]:
    """Returns (y_BTD, the updated cache, the metrics of both); see `Attention`."""
    of_attention = None if cache is None else cache.attention
    of_recurrent = None if cache is None else cache.recurrent
    y_BTD, of_attention, aux = self.attention(x_BTD, context, of_attention)
    z_BTD, of_recurrent, more = self.recurrent(x_BTD, context, of_recurrent)
    if cache is not None:
      assert of_recurrent is not None
      cache = ParallelCache(attention=of_attention, recurrent=of_recurrent)
    return y_BTD + z_BTD, cache, add(aux, more)

  def empty_cache(self, batch: int, length: int, dtype: Any) -> ParallelCache:
    """Returns empty caches for `batch` sequences of up to `length` tokens."""
    return ParallelCache(
      attention=self.attention.empty_cache(batch, length, dtype),
      recurrent=self.recurrent.empty_cache(batch, length, dtype),
    )

  def num_slots(self, length: int) -> int:
    """Returns the number of cache slots of attention for a sequence of `length` tokens."""
    return self.attention.num_slots(length)
