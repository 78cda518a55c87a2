# SPDX-License-Identifier: Apache-2.0
"""The base class of layers with a recurrent state."""

from typing import Any

import jax

from paxlike.layers.aux_losses import Aux
from paxlike.layers.call_context import Context
from paxlike.layers.module import Module
from paxlike.layers.recurrent.cache import RecurrentCache


class RecurrentMixer(Module):
  """Mixes tokens through a state of constant size; it takes the place of attention in a block.

  Attributes:
    num_heads: N, the number of states.
    key_dim, value_dim: The dims of a head's state, which is a matrix.
    chunk: Tokens that are computed together by matmuls; states are passed from chunk to chunk.
  """

  num_heads: int
  key_dim: int
  value_dim: int
  chunk: int

  def __call__(
    self, x_BTD: jax.Array, context: Context, cache: RecurrentCache | None = None
  ) -> tuple[jax.Array, RecurrentCache | None, Aux]:
    """Returns (y_BTD, the updated cache, the layer's metrics).

    With a cache, T > 1 prefills an empty cache; T == 1 decodes a token. Tokens at position -1 are
    padding after the last token, and leave the cache as it is.
    """
    raise NotImplementedError

  def empty_cache(self, batch: int, length: int, dtype: Any) -> RecurrentCache:
    """Returns an empty cache for `batch` sequences; its size does not depend on `length`."""
    raise NotImplementedError

  def num_slots(self, length: int) -> int:
    """Returns 0: the cache does not grow with the sequence."""
    del length
    return 0

  def score_flops(self, num_tokens: int) -> tuple[float, float]:
    """Returns the forward FLOPs per token besides linear maps: (full, causal).

    The model's own count: a token's update of the state and its read. Chunks need more.
    """
    del num_tokens
    flops = 4 * self.num_heads * self.key_dim * self.value_dim
    return flops, flops

  @property
  def chunk_flops(self) -> float:
    """Forward FLOPs per token that chunks compute besides linear maps, for the planner.

    Pairs of tokens within a chunk, and the update and read of a state per chunk.
    """
    dims = self.key_dim + self.value_dim
    return self.num_heads * (2 * self.chunk * dims + 4 * self.key_dim * self.value_dim)

  @property
  def chunk_numbers(self) -> float:
    """float32 numbers per token that the backward pass works with, for the planner."""
    of_state = self.key_dim * self.value_dim / self.chunk
    return self.num_heads * (4 * self.chunk + 2 * (self.key_dim + self.value_dim) + 4 * of_state)

  @property
  def exchanged(self) -> float:
    """Numbers per sequence that a device of the axis `context` sends, for the planner."""
    return self.num_heads * (1 + self.key_dim * self.value_dim)
