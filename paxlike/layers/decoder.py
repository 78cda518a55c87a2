# SPDX-License-Identifier: Apache-2.0
"""The language model: embeddings, a stack of blocks, a norm, an output projection."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike import mesh, ranges
from paxlike.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers import sums
from paxlike.layers.auto_attention import Place, described, in_effect
from paxlike.layers.block import Aux, by_token
from paxlike.layers.context import Context
from paxlike.layers.cudnn_attention import MAX_SEGMENTS, cudnn
from paxlike.layers.dropout import Dropout
from paxlike.layers.embedding import Embedding, PositionEmbedding
from paxlike.layers.linear import Linear
from paxlike.layers.loss import Shards, cross_entropy, gathered, sum_over_chunks
from paxlike.layers.module import Definition, Module, Params
from paxlike.layers.stack import Caches, Stack

# [B, T]: int32 `inputs` and `targets`, float32 `weights`; if packed int32 `segments`, `positions`.
Batch = dict[str, jax.Array]


@configurable
class Decoder(Module):
  """A decoder-only transformer.

  Attributes:
    vocab_size: V, the number of token ids.
    loss_chunks: Parts of the sequence whose logits are held one after another.
  """

  def __init__(
    self,
    *,
    vocab_size: ranges.Size,
    dim: ranges.Size,
    embedding: Callable[[int, int], Embedding],
    stack: Callable[[int], Stack],
    norm: Callable[[int], Any],
    positions: Callable[[int], PositionEmbedding] | None = None,
    dropout: Callable[[], Dropout] | None = None,
    head: Callable[..., Linear] | None = None,
    soft_cap: ranges.Cap | None = None,
    loss_chunks: ranges.Size = 4,
  ):
    """Without `head` the embedding's table also projects to logits.

    With `soft_cap` logits x become soft_cap * tanh(x / soft_cap).
    """
    self.soft_cap = soft_cap
    self.loss_chunks = loss_chunks
    self.vocab_size = vocab_size
    self.embedding = embedding(vocab_size, dim)
    self.positions = None if positions is None else positions(dim)
    self.dropout = None if dropout is None else dropout()
    self.stack = stack(dim)
    self.norm = norm(dim)
    self.head = None if head is None else head({"model": dim}, {"vocab": vocab_size})

  def check_data(self, seq_len: int, num_ids: int | None):
    """Finds whether the model knows every position and token id of data.

    Args:
      seq_len: Tokens of their sequences.
      num_ids: The number that their ids are below; None: not known.

    Raises:
      UserError: It does not.
    """
    if num_ids is not None and num_ids > self.vocab_size:
      raise UserError(
        f"the data may have token ids up to {num_ids - 1}, but the model knows"
        f" {self.vocab_size}: VOCAB_SIZE is for both, model.vocab_size for the model alone."
      )
    if self.positions is not None and seq_len > (
      known := self.positions.table.get_value().shape[0]
    ):
      raise UserError(
        f"the data have sequences of {seq_len} tokens, but the model knows {known} positions:"
        " MAX_SEQ_LEN is for both."
      )

  def kernels(self, place: Place, *, is_packed: bool = False) -> list[str]:
    """Returns what computes attention, as users call it, of sequences with segments or without."""
    found = set()
    for module in self._attention:
      demand = module.demand(is_packed=is_packed)
      found.add(described(in_effect(module.kernel, demand, place), demand))
    return sorted(found)

  def max_segments(self, place: Place) -> int | None:
    """Returns the most segments of a sequence that attention has room for; None: any number."""
    limits = []
    for module in self._attention:
      if in_effect(module.kernel, module.demand(is_packed=True), place) is cudnn:
        given = getattr(module.kernel, "keywords", {})
        limits.append(given.get("max_segments", MAX_SEGMENTS))
    return min(limits, default=None)

  @property
  def _attention(self) -> list[Any]:
    return [module for _, module in nnx.iter_modules(self) if hasattr(module, "demand")]

  def hidden(
    self, tokens_BT: jax.Array, context: Context, caches: Caches | None = None
  ) -> tuple[jax.Array, Caches | None, Aux]:
    """Returns (x_BTD before the output projection, the caches, what the layers report)."""
    x_BTD = self.embed(tokens_BT, context)
    x_BTD, caches, aux = self.stack(x_BTD, context.fold(1), caches)
    return by_token(self.norm, x_BTD), caches, aux

  def embed(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
    """Returns x_BTD before the first layer."""
    x_BTD = self.embedding(tokens_BT)
    if self.positions is not None:
      x_BTD = sums.add(x_BTD, self.positions(tokens_BT.shape[1], context.positions_BT))
    x_BTD = mesh.constrain(x_BTD, "batch", "time", None)
    return x_BTD if self.dropout is None else self.dropout(x_BTD, context.fold(0))

  def logits(self, x: jax.Array) -> jax.Array:
    """Returns [..., V] in the compute dtype for what `hidden` gives, [..., D]."""
    return _logits(self.embedding if self.head is None else self.head, x, self.soft_cap)

  def __call__(self, tokens_BT: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
    """Returns (logits_BTV in the compute dtype, what the layers report)."""
    x_BTD, _, aux = self.hidden(tokens_BT, context)
    return mesh.constrain(self.logits(x_BTD), "batch", "time", "vocab"), aux

  def loss(self, batch: Batch, context: Context) -> tuple[jax.Array, Aux]:
    """Returns (the weighted sum of cross-entropies in nats, what the layers report)."""
    x_BTD, _, aux = self.hidden(batch["inputs"], context)
    return self.token_loss(x_BTD, batch["targets"], batch["weights"]), aux

  def token_loss(self, x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Returns the weighted sum of cross-entropies, in nats, for what `hidden` gives.

    The logits never exist as a whole: they are made, and turned into gradients, a part of the
    sequence at a time.
    """
    graph, weights = nnx.split(_gathered(self.embedding if self.head is None else self.head))
    shards = Shards.of(targets_BT.shape)
    batch, time = (None, None) if shards.axes else ("batch", "time")  # A shard is on one device.

    def chunk_loss(weights, x_BTD, constants):
      logits_BTV = _logits(nnx.merge(graph, weights), x_BTD, self.soft_cap)
      logits_BTV = mesh.constrain(logits_BTV, batch, time, "vocab")
      targets_BT, weights_BT = constants
      return (cross_entropy(logits_BTV, targets_BT) * weights_BT).sum()

    arrays = (x_BTD, (targets_BT, weights_BT))
    chunks = jax.tree.map(lambda x: shards.chunks(x, self.loss_chunks), arrays)
    return sum_over_chunks(chunk_loss, weights, *chunks, shards.axes)

  def map_logits(self, function: Callable[..., Any], x_BTD: jax.Array, arrays: Any) -> Any:
    """Returns function(logits_BTV, arrays), made a part of the sequence at a time.

    No logits are kept for a gradient.

    Args:
      function: Of such a part; all leaves of what it takes and returns are [B, T, ...].
      x_BTD: What `hidden` gives.
      arrays: A pytree.
    """

    head = _gathered(self.embedding if self.head is None else self.head)

    def apply(chunk):
      x_BTD, arrays = chunk
      logits_BTV = _logits(head, x_BTD, self.soft_cap)
      return function(mesh.constrain(logits_BTV, "batch", "time", "vocab"), arrays)

    def join(x: jax.Array) -> jax.Array:
      return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, : x_BTD.shape[1]]

    unsharded = Shards(1, 1, ())
    chunks = jax.tree.map(lambda x: unsharded.chunks(x, self.loss_chunks), (x_BTD, arrays))
    return jax.tree.map(join, jax.lax.map(jax.checkpoint(apply), chunks))


def _gathered(head: Embedding | Linear) -> Embedding | Linear:
  """Returns a head whose weights are all-gathered once, not once for each chunk of a sequence."""
  graph, weights = nnx.split(head)

  def whole(param: nnx.Variable) -> Any:
    w = param.get_value()
    return gathered(w, param.dims) if isinstance(w, jax.Array) else w

  flat = [(path, whole(param)) for path, param in nnx.to_flat_state(weights)]
  return nnx.merge(graph, nnx.from_flat_state(flat))


def _logits(head: Embedding | Linear, x: jax.Array, soft_cap: float | None) -> jax.Array:
  logits = head.attend(x) if isinstance(head, Embedding) else head(x)
  return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def context_of(batch: Batch, dropout: jax.Array | None = None) -> Context:
  """Returns what layers may need to know of a batch."""
  return Context(
    segments_BT=batch.get("segments"), positions_BT=batch.get("positions"), dropout=dropout
  )


def forward(definition: Definition, params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
  """Returns (logits_BTV, what the layers report) of a batch."""
  return definition.bind(params)(batch["inputs"], context_of(batch))
