# SPDX-License-Identifier: Apache-2.0
"""The language model: embeddings, a stack of blocks, a norm, an output projection."""

from collections.abc import Callable
from typing import Any

import jax

from paxlike import mesh
from paxlike.layers.block import Aux
from paxlike.layers.context import Context
from paxlike.layers.dropout import Dropout
from paxlike.layers.embedding import Embedding, PositionEmbedding
from paxlike.layers.linear import Linear
from paxlike.layers.module import Definition, Module, Params
from paxlike.layers.stack import Stack

# int32 `inputs` and `targets`, float32 `weights`, and if packed int32 `segments`, `positions`: [B, T].
Batch = dict[str, jax.Array]


class Decoder(Module):
  """A decoder-only transformer.

  Attributes:
    vocab_size: V, the number of token ids.
  """

  def __init__(
    self,
    *,
    vocab_size: int,
    dim: int,
    embedding: Callable[[int, int], Embedding],
    stack: Callable[[int], Stack],
    norm: Callable[[int], Any],
    positions: Callable[[int], PositionEmbedding] | None = None,
    dropout: Callable[[], Dropout] | None = None,
    head: Callable[..., Linear] | None = None,
  ):
    """Without `head` the embedding's table also projects to logits."""
    self.vocab_size = vocab_size
    self.embedding = embedding(vocab_size, dim)
    self.positions = None if positions is None else positions(dim)
    self.dropout = None if dropout is None else dropout()
    self.stack = stack(dim)
    self.norm = norm(dim)
    self.head = None if head is None else head({"model": dim}, {"vocab": vocab_size})

  def __call__(self, tokens_BT: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
    """Returns (logits_BTV in the compute dtype, what the layers report)."""
    x_BTD = self.embedding(tokens_BT)
    if self.positions is not None:
      x_BTD += self.positions(tokens_BT.shape[1], context.positions_BT)
    x_BTD = mesh.constrain(x_BTD, "batch", "time", None)
    if self.dropout is not None:
      x_BTD = self.dropout(x_BTD, context.fold(0))
    x_BTD, aux = self.stack(x_BTD, context.fold(1))
    x_BTD = self.norm(x_BTD)
    logits_BTV = self.embedding.attend(x_BTD) if self.head is None else self.head(x_BTD)
    return mesh.constrain(logits_BTV, "batch", "time", "vocab"), aux


def forward(
  definition: Definition, params: Params, batch: Batch, dropout: jax.Array | None = None
) -> tuple[jax.Array, Aux]:
  """Returns (logits_BTV, what the layers report) of a batch."""
  context = Context(
    segments_BT=batch.get("segments"), positions_BT=batch.get("positions"), dropout=dropout
  )
  return definition.bind(params)(batch["inputs"], context)
