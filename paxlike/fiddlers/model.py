# SPDX-License-Identifier: Apache-2.0
"""Fiddlers of what the model of any family consists of."""

import copy
import typing
from typing import Any

import fiddle as fdl

from paxlike import layers
from paxlike.config import ranges
from paxlike.errors import UserError, did_you_mean
from paxlike.fiddlers import layout
from paxlike.fiddlers.selection import having, select
from paxlike.training import objectives


def qk_norm(graph: fdl.Buildable):
  """Adds RMSNorm of queries and keys (Dehghani et al., 2023, arXiv:2302.05442) where none is.

  Raises:
    UserError: The model's attention has no such norm, as latent attention.
  """
  if any(select(graph, layers.LatentAttention)):
    raise UserError("QK_NORM: latent attention has norms of its own.")
  for node in select(graph, layers.Attention):
    if not _normalizes(node):
      node.qk_norm = fdl.Partial(layers.RmsNorm)


def qk_clip(graph: fdl.Buildable, threshold: ranges.PositiveFloat = 100.0):
  """Adds QK-clip to all attention layers; see `layers.QkClip`.

  Raises:
    UserError: Queries and keys are normalized, so that the scales of their weights have no effect.
  """
  for node in (*select(graph, layers.Attention), *select(graph, layers.LatentAttention)):
    if _normalizes(node):
      raise UserError(
        "QK_CLIP: this model normalizes queries and keys, so scaling their weights has no effect:"
        " leave it out."
      )
    node.qk_clip = fdl.Partial(layers.QkClip, threshold=threshold)


def _normalizes(attention: fdl.Buildable) -> bool:
  """Returns whether an attention layer normalizes its queries and keys."""
  return any(getattr(attention, name, None) is not None for name in ("qk_norm", "joint_qk_norm"))


def multi_token_prediction(
  graph: fdl.Buildable,
  num_layers: ranges.Depth = 1,
  kind: layers.MtpKind = "sequential",
  loss_weight: ranges.Weight = 0.1,
):
  """Adds layers that predict the `num_layers` tokens after the next one, in training.

  Their blocks are like the last one of the pattern of layers, and their norms like the last norm.
  """
  if kind not in (kinds := typing.get_args(layers.MtpKind)):
    raise UserError(f"MTP_KIND: no kind {kind}.{did_you_mean(kind, kinds)}")
  for node in select(graph, layers.Decoder):
    block = _independent(node.stack)
    options = {"num_layers": num_layers, "block": block, "loss_weight": loss_weight}
    options["remat"] = getattr(node.stack, "remat", layers.Remat.SAVE_EVERYTHING)
    if kind == "parallel":
      node.mtp = fdl.Partial(layers.ParallelMtp, **options)
      continue
    like = next(select(block, layers.Linear))
    projection = fdl.Partial(layers.Linear, role=layers.multi_token.ROLE, dtype=like.dtype)
    projection.init = copy.deepcopy(like.init)
    norm = copy.deepcopy(node.norm)
    node.mtp = fdl.Partial(layers.SequentialMtp, norm=norm, projection=projection, **options)


def _independent(stack: fdl.Buildable) -> fdl.Buildable:
  """Returns a block like the last one of the pattern that reads no arrays but its input.

  Where the pattern's layers attend to keys of earlier ones, it is like the last of these.
  """
  attention = stack.pattern[-1].attention
  has_keys = not hasattr(attention, "key") or attention.key is not None
  block: Any = copy.deepcopy((stack.pattern if has_keys else stack.prologue)[-1])
  if any(select(block, layers.KvSource)):
    fdl.update_callable(block.attention, layers.Attention)
  if getattr(block, "per_layer_input", None) is not None:
    block.per_layer_input = None
  return block


def next_token_only(graph: fdl.Buildable):
  """Removes what only training uses: layers for multi-token prediction, and the value head."""
  for node in select(graph, layers.Decoder):
    for name in ("mtp", "value_head"):
      if getattr(node, name, None) is not None:
        setattr(node, name, None)


def loss(
  graph: fdl.Buildable,
  z_loss: ranges.NonNegativeFloat = 0.0,
  label_smoothing: ranges.Smoothing = 0.0,
):
  """Adds a z-loss to the training loss, and smooths its targets; see `cross_entropy`."""
  for node in select(graph, layers.Decoder):
    node.z_loss, node.label_smoothing = z_loss, label_smoothing


def rescale(graph: fdl.Buildable, embedding: ranges.Factor = 1.0, residual: ranges.Factor = 1.0):
  """Multiplies the scales of the embedded tokens and of the outputs of attention and MLP.

  Applied after `parametrize`, whose factors stay: these are the same for the base model.

  Raises:
    UserError: The model normalizes its embeddings, so that their scale has no effect.
  """
  for node in select(graph, layers.Decoder):
    if embedding != 1 and getattr(node, "embedding_norm", None) is not None:
      raise UserError(
        "EMBEDDING_SCALE: this model normalizes its embeddings, so their scale has no effect."
      )
  for node in select(graph, layers.Embedding):
    node.scale = getattr(node, "scale", 1.0) * embedding
  for node in select(graph, layers.Block):
    node.residual_scale = getattr(node, "residual_scale", 1.0) * residual


def decoding(graph: fdl.Buildable):
  """Prepares a model for decoding: unrolls layers, and makes MoE dispatch dropless.

  A scan over layers would copy the KV caches for every token. What only training uses is removed.
  """
  next_token_only(graph)
  layout.stack(graph, scan=False)
  for node in select(graph, layers.Moe):
    node.dispatch = layers.dispatch.dropless


def without_teacher(graph: fdl.Buildable):
  """Trains on the next token instead of a teacher's predictions, for a model that was shrunk."""
  objective: Any = fdl.get_callable(graph.objective)
  if issubclass(objective, objectives.Gkd):
    graph.objective = fdl.Config(objectives.NextToken)


def shrink(graph: fdl.Buildable, seq_len: ranges.Size = 32):
  """Shrinks a model of any family so that it compiles and trains within seconds on a CPU.

  The structure stays: windows are shorter than `seq_len`, grouped heads stay grouped, and the
  layer pattern is repeated twice, or once per pipeline chunk.
  """
  vocab_size = 96
  for node in select(graph, layers.Decoder):
    node.vocab_size, node.dim = vocab_size, 32
  for node in select(graph, layers.Stack):
    pipeline = getattr(node, "pipeline", None)
    node.repeats = 2 if pipeline is None else pipeline.stages * pipeline.chunks
    node.prologue = [
      block
      for index, block in enumerate(node.prologue)
      if not index or any(select(block, layers.KvSource))
    ]
    node.epilogue = list(node.epilogue)[:1]
  for node in select(graph, layers.Attention):
    grouped = node.num_kv_heads is not None and node.num_kv_heads < node.num_heads
    node.num_heads, node.head_dim = 4, 16
    node.num_kv_heads = 2 if grouped else None
    node.window = None if node.window is None else 8
    node.chunk = None if node.chunk is None else 8
  for node in select(graph, layers.LongRope):
    pairs = int(16 * node.share) // 2
    node.short_factors, node.long_factors = node.short_factors[:pairs], node.long_factors[:pairs]
  for node in select(graph, layers.LatentAttention):
    node.num_heads, node.head_dim, node.rope_dim, node.value_dim = 4, 16, 8, 16
    node.rank, node.query_rank = 16, 24
  for node in select(graph, layers.Indexer):
    node.num_heads, node.head_dim, node.top_k = 8, 16, 6
  for node in select(graph, layers.Mamba2):
    grouped = node.num_groups > 1
    node.num_heads, node.head_dim, node.state_dim, node.num_groups = 8, 8, 8, 2 if grouped else 1
    node.chunk = 8
  for node in select(graph, layers.GatedDeltaNet):
    grouped = node.num_key_heads < node.num_heads
    node.num_heads, node.num_key_heads = 4, 2 if grouped else 4
    node.key_dim, node.value_dim, node.chunk = 8, 12, 8
  for node in select(graph, layers.Mlp):
    node.hidden_dim = 48
  for node in select(graph, layers.Moe):
    node.num_experts, node.num_chosen = 4, min(node.num_chosen, 2)
    if "num_groups" in getattr(node.choice, "__arguments__", {}):
      node.choice.num_groups, node.choice.num_chosen_groups = 2, 1
  for node in select(graph, layers.Experts):
    node.hidden_dim = 24
  for node in select(graph, layers.PositionEmbedding):
    node.max_len = seq_len
  for kind in (layers.PerLayerEmbedding, layers.PerLayerInput):
    for node in select(graph, kind):
      node.width = 8
  for node in having(graph, "seq_len"):
    node.seq_len = seq_len
    if getattr(node, "vocab_size", None) is not None:
      node.vocab_size = vocab_size
