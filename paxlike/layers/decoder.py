# SPDX-License-Identifier: Apache-2.0
"""The language model: embeddings, a stack of blocks, a norm, an output projection."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.devices import mesh
from paxlike.errors import ArgumentError
from paxlike.layers.attention.auto import Place, described, in_effect
from paxlike.layers.attention.cudnn import MAX_SEGMENTS, cudnn
from paxlike.layers.attention.rope import LongRope
from paxlike.layers.attention.sparse_latent_attention import SparseLatentAttention
from paxlike.layers.aux_losses import Aux, add, none
from paxlike.layers.block import by_token
from paxlike.layers.call_context import Context
from paxlike.layers.dropout import Dropout
from paxlike.layers.embedding import Embedding, PositionEmbedding
from paxlike.layers.linear import Linear
from paxlike.layers.loss import Shards, cross_entropy, gathered, sum_over_chunks
from paxlike.layers.module import Definition, Module, Params
from paxlike.layers.multi_token import MultiTokenPrediction
from paxlike.layers.per_layer_input import PerLayerEmbedding
from paxlike.layers.precision import float32_sums
from paxlike.layers.stack import Caches, Stack

# Name -> [B, T]: int32 `inputs` and `targets`, float32 `weights`; if packed, also int32 `segments`
# and `positions`.
Batch = dict[str, jax.Array]

# A regular expression that matches the names of the weights of a value head.
VALUE_HEAD = r"^value_head\."


@configurable
class Decoder(Module):
  """A decoder-only transformer.

  Attributes:
    vocab_size: V, the number of token ids.
    loss_chunks: The loss is computed over this many chunks of the sequence, to bound the memory of
      the logits.
  """

  def __init__(
    self,
    *,
    vocab_size: ranges.Size,
    dim: ranges.Size,
    embedding: Callable[[int, int, bool], Embedding],
    stack: Callable[[int], Stack],
    norm: Callable[[int], Any],
    embedding_norm: Callable[[int], Any] | None = None,
    positions: Callable[[int], PositionEmbedding] | None = None,
    layer_inputs: Callable[[int, int, int], PerLayerEmbedding] | None = None,
    dropout: Callable[[], Dropout] | None = None,
    head: Callable[..., Linear] | None = None,
    mtp: Callable[[int], MultiTokenPrediction] | None = None,
    value_head: Callable[..., Linear] | None = None,
    soft_cap: ranges.Cap | None = None,
    loss_chunks: ranges.Size = 4,
    z_loss: ranges.NonNegativeFloat = 0.0,
    label_smoothing: ranges.Smoothing = 0.0,
  ):
    """Without `head`, the embedding table also projects to logits (tied embeddings).

    `layer_inputs` makes the inputs of the blocks' `per_layer_input`.

    `mtp` adds losses of later tokens in training; evaluation and decoding do not use its weights.
    `value_head` estimates the rewards to come; see `values`. Only reinforcement learning uses it.

    With `soft_cap`, logits x become soft_cap * tanh(x / soft_cap). `z_loss` and `label_smoothing`
    are those of `cross_entropy`, in training.
    """
    self.z_loss = z_loss
    self.label_smoothing = label_smoothing
    self.soft_cap = soft_cap
    self.loss_chunks = loss_chunks
    self.vocab_size = vocab_size
    self.embedding = embedding(vocab_size, dim, head is None)
    self.embedding_norm = None if embedding_norm is None else embedding_norm(dim)
    self.positions = None if positions is None else positions(dim)
    self.dropout = None if dropout is None else dropout()
    self.stack = stack(dim)
    num_layers = self.stack.layout.num_layers
    self.layer_inputs = None if layer_inputs is None else layer_inputs(vocab_size, dim, num_layers)
    self.norm = norm(dim)
    self.head = None if head is None else head({"model": dim}, {"vocab": self.num_outputs})
    self.mtp = None if mtp is None else mtp(dim)
    self.value_head = None if value_head is None else value_head({"model": dim}, {"vocab": 1})

  @property
  def num_outputs(self) -> int:
    """The number of outputs of the head."""
    return self.vocab_size

  def check_data(self, seq_len: int, num_ids: int | None):
    """Checks that the vocabulary and the position table cover the data.

    Args:
      seq_len: Tokens per sequence.
      num_ids: Upper bound (exclusive) of the token ids; None: unknown.

    Raises:
      UserError: The vocabulary or the position table is too small.
    """
    if num_ids is not None and num_ids > self.vocab_size:
      raise ArgumentError(
        f"the data have token ids up to {num_ids - 1}: vocab_size={self.vocab_size} of the model"
        f" must be at least {num_ids}."
      )
    if self.positions is not None and seq_len > (
      max_len := self.positions.table.get_value().shape[0]
    ):
      raise ArgumentError(
        f"the data have sequences of {seq_len} tokens: {max_len=} of the model's positions must be"
        f" at least {seq_len}."
      )

  def kernels(
    self, place: Place, *, is_packed: bool = False, seq_len: int | None = None
  ) -> list[str]:
    """Returns the names of the attention kernels in use, for packed or unpacked sequences.

    "sparse" is that of sparse attention, if `seq_len` tokens are more than it selects.
    """
    found = set()
    for module in self._attention:
      if isinstance(module, SparseLatentAttention) and (seq_len or 0) > module.indexer.top_k:
        found.add("sparse")
        continue
      requirements = module.requirements(is_packed=is_packed)
      found.add(described(in_effect(module.kernel, requirements, place), requirements))
    return sorted(found)

  def max_segments(self, place: Place) -> int | None:
    """Returns the largest number of segments per sequence that attention supports; None: any."""
    limits = []
    for module in self._attention:
      if in_effect(module.kernel, module.requirements(is_packed=True), place) is cudnn:
        given = getattr(module.kernel, "keywords", {})
        limits.append(given.get("max_segments", MAX_SEGMENTS))
    return min(limits, default=None)

  @property
  def rope_switch(self) -> int | None:
    """The number of tokens beyond which a document has other rotary positions; None: none."""
    switches = [m.original_length for _, m in nnx.iter_modules(self) if isinstance(m, LongRope)]
    return min(switches, default=None)

  @property
  def _attention(self) -> list[Any]:
    return [module for _, module in nnx.iter_modules(self) if hasattr(module, "requirements")]

  def hidden(
    self, tokens_BT: jax.Array, context: Context, caches: Caches | None = None
  ) -> tuple[jax.Array, Caches | None, Aux]:
    """Returns (x_BTD before the output projection, the updated caches, the layers' Aux)."""
    x_BTD = self.embed(tokens_BT, context)
    context = self._of_layers(tokens_BT, x_BTD, context)
    x_BTD, caches, aux = self.stack(x_BTD, context, caches)
    return by_token(self.norm, x_BTD), caches, aux

  def losses(self, batch: Batch, context: Context) -> tuple[jax.Array, Aux]:
    """Returns (the sum of the next tokens' losses, the Aux of layers and of `mtp`)."""
    x_BTD = self.embed(batch["inputs"], context)
    x_BTD, _, aux = self.stack(x_BTD, self._of_layers(batch["inputs"], x_BTD, context))
    states, of_states = self.further(x_BTD, batch, context)
    x_BTD = by_token(self.norm, x_BTD)
    loss = self.token_loss(x_BTD, batch["targets"], batch["weights"])
    return loss, add(add(aux, of_states), self.further_losses(states, batch))

  @jax.named_scope("mtp")
  def further(self, x_BTD: jax.Array, batch: Batch, context: Context) -> tuple[list[Any], Aux]:
    """Returns (the states of multi-token prediction, if any, the Aux of its layers).

    x_BTD is the output of the last block.
    """
    if self.mtp is None:
      return [], none()
    return self.mtp.hidden(x_BTD, batch, context.fold(2), embed=self.embed, norm=self.norm)

  @jax.named_scope("mtp")
  def further_losses(self, states: Sequence[jax.Array], batch: Batch, **options: Any) -> Aux:
    """Returns the losses of the states of `further`; `options` are for the module's `losses`."""
    if self.mtp is None:
      return none()
    return self.mtp.losses(states, batch, self.token_loss, **options)

  @jax.named_scope("embedding")
  def embed(self, tokens_BT: jax.Array, context: Context) -> jax.Array:
    """Returns x_BTD before the first layer."""
    x_BTD = self.embedding(tokens_BT)
    if self.embedding_norm is not None:
      x_BTD = by_token(self.embedding_norm, x_BTD)
    if self.positions is not None:
      x_BTD = float32_sums.add(x_BTD, self.positions(tokens_BT.shape[1], context.positions_BT))
    x_BTD = mesh.constrain(x_BTD, "batch", "time", None)
    return x_BTD if self.dropout is None else self.dropout(x_BTD, context.fold(0))

  def _of_layers(self, tokens_BT: jax.Array, x_BTD: jax.Array, context: Context) -> Context:
    """Returns the context of the stack."""
    context = context.fold(1)
    if self.layer_inputs is None:
      return context
    inputs_LBTP = self.layer_inputs(tokens_BT, x_BTD, context)
    return dataclasses.replace(context, layer_inputs=inputs_LBTP)

  @jax.named_scope("head")
  def logits(self, x: jax.Array) -> jax.Array:
    """Returns logits [..., V] in the compute dtype for final hidden states [..., D]."""
    return _logits(self.embedding if self.head is None else self.head, x, self.soft_cap)

  def projection(self) -> Callable[[jax.Array], jax.Array]:
    """Returns the function `logits`, whose weights are all-gathered once for all its calls."""
    head = _gathered(self.embedding if self.head is None else self.head)
    return lambda x: _logits(head, x, self.soft_cap)

  @jax.named_scope("value_head")
  def values(self, x_BTD: jax.Array) -> jax.Array | None:
    """Returns the value head's output for final hidden states, float32 [B, T]; None without one.

    It is a linear map to one number for each token: the rewards to come after it.
    """
    if self.value_head is None:
      return None
    return self.value_head(x_BTD)[..., 0].astype(jnp.float32)

  def __call__(self, tokens_BT: jax.Array, context: Context) -> tuple[jax.Array, Aux]:
    """Returns (logits_BTV in the compute dtype, the layers' Aux)."""
    x_BTD, _, aux = self.hidden(tokens_BT, context)
    return mesh.constrain(self.logits(x_BTD), "batch", "time", "vocab"), aux

  def token_loss(self, x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array) -> jax.Array:
    """Returns the weighted sum of cross-entropies, in nats, for final hidden states x_BTD."""

    def loss(logits_BTV: jax.Array, arrays: tuple[jax.Array, jax.Array]) -> jax.Array:
      targets_BT, weights_BT = arrays
      given = {"z_loss": self.z_loss, "smoothing": self.label_smoothing}
      return (cross_entropy(logits_BTV, targets_BT, **given) * weights_BT).sum()

    return self.sum_of_losses(loss, x_BTD, (targets_BT, weights_BT))

  @jax.named_scope("head")
  def sum_of_losses(
    self, loss: Callable[[jax.Array, Any], jax.Array], x_BTD: jax.Array, arrays: Any
  ) -> jax.Array:
    """Returns the sum of loss(logits_BTV, arrays), a float32 scalar, for final hidden states x_BTD.

    The full logits are never materialized: logits and their gradients are computed one chunk of
    the sequence at a time. `arrays` is a pytree of [B, T, ...] that is not differentiated.
    """
    graph, weights = nnx.split(_gathered(self.embedding if self.head is None else self.head))
    shards = Shards.of(x_BTD.shape[:2])
    batch, time = (None, None) if shards.axes else ("batch", "time")  # Local within a shard.

    def chunk_loss(weights, x_BTD, arrays):
      logits_BTV = _logits(nnx.merge(graph, weights), x_BTD, self.soft_cap)
      return loss(mesh.constrain(logits_BTV, batch, time, "vocab"), arrays)

    chunks = jax.tree.map(lambda x: shards.chunks(x, self.loss_chunks), (x_BTD, arrays))
    return sum_over_chunks(chunk_loss, weights, *chunks, shards.axes)

  @jax.named_scope("head")
  def map_logits(self, function: Callable[..., Any], x_BTD: jax.Array, arrays: Any) -> Any:
    """Returns function(logits_BTV, arrays), computed one chunk of the sequence at a time.

    The backward pass recomputes the logits.

    Args:
      function: Called on each chunk; all leaves of its arguments and result are [B, T, ...].
      x_BTD: The final hidden states.
      arrays: A pytree of [B, T, ...].
    """

    project = self.projection()

    def apply(chunk):
      x_BTD, arrays = chunk
      logits_BTV = project(x_BTD)
      return function(mesh.constrain(logits_BTV, "batch", "time", "vocab"), arrays)

    def join(x: jax.Array) -> jax.Array:
      return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, : x_BTD.shape[1]]

    unsharded = Shards(1, 1, ())
    chunks = jax.tree.map(lambda x: unsharded.chunks(x, self.loss_chunks), (x_BTD, arrays))
    return jax.tree.map(join, jax.lax.map(jax.checkpoint(apply), chunks))


def _gathered(head: Embedding | Linear) -> Embedding | Linear:
  """Returns the head with its weights all-gathered once instead of once per chunk."""
  graph, weights = nnx.split(head)

  def gather(param: nnx.Variable) -> Any:
    w = param.get_value()
    return gathered(w, param.dims) if isinstance(w, jax.Array) else w

  flat = [(path, gather(param)) for path, param in nnx.to_flat_state(weights)]
  return nnx.merge(graph, nnx.from_flat_state(flat))


def _logits(head: Embedding | Linear, x: jax.Array, soft_cap: float | None) -> jax.Array:
  logits = head.attend(x) if isinstance(head, Embedding) else head(x)
  return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def context_of(batch: Batch, dropout: jax.Array | None = None) -> Context:
  """Returns the context of a batch; `dropout` is the dropout key."""
  return Context(
    segments_BT=batch.get("segments"), positions_BT=batch.get("positions"), dropout=dropout
  )


def forward(definition: Definition, params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
  """Returns (logits_BTV, the layers' Aux) of a batch."""
  return definition.bind(params)(batch["inputs"], context_of(batch))
