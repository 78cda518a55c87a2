# SPDX-License-Identifier: Apache-2.0
"""The model's knobs, and the methods that return it, its layers and their parts."""

from typing import Any

import fiddle as fdl

from paxlike import layers
from paxlike.config import graph_types, ranges
from paxlike.config.knobs import UNSET, Knobs
from paxlike.errors import UserError
from paxlike.layers.remat import Policy


class ModelKnobs(Knobs):
  """Model: sizes of the decoder, and how its layers are computed."""

  VOCAB_SIZE: ranges.Size = UNSET  #: Number of token ids.
  MAX_SEQ_LEN: ranges.Size = 2048  #: Tokens per sequence.
  NUM_LAYERS: ranges.Depth = UNSET  #: Number of transformer blocks.
  MODEL_DIMS: ranges.Size = UNSET  #: Width of the residual stream.
  HIDDEN_DIMS: ranges.Size | None = None  #: Width of the feed-forward layer. None: 4 x MODEL_DIMS.
  NUM_HEADS: ranges.Size = UNSET  #: Number of attention heads.
  DIMS_PER_HEAD: ranges.Size | None = None  #: Width of a head. None: MODEL_DIMS / NUM_HEADS.
  INIT_STD: ranges.Weight = 0.02  #: Standard deviation of initial weights.
  QK_NORM: bool = False  #: RMSNorm of each head's queries and keys; families may have it anyway.
  #: Largest attention logit of a head, beyond which its query and key weights are scaled down after
  #: each step (MuonClip); Kimi K2 has 100. None: no bound.
  QK_CLIP: ranges.PositiveFloat | None = None
  #: Multiplies the embedded tokens, after the family's own scale (Gemma's root of MODEL_DIMS).
  EMBEDDING_SCALE: ranges.Factor = 1.0
  #: Multiplies the outputs of attention and MLP before they are added to the residual stream, such
  #: as Granite's residual_multiplier and MiniCPM's scale_depth / root of NUM_LAYERS.
  RESIDUAL_SCALE: ranges.Factor = 1.0
  #: Factor of the training loss's z-loss, the square of log(sum(exp(logits))); PaLM has 1e-4.
  Z_LOSS: ranges.NonNegativeFloat = 0.0
  #: Probability that the training loss's targets spread over all tokens.
  LABEL_SMOOTHING: ranges.Smoothing = 0.0
  #: Multi-token prediction: layers that predict tokens after the next one, in training only.
  MTP_NUM_LAYERS: ranges.Repeats = 0
  #: sequential: DeepSeek-V3's modules, each on the one before; parallel: independent blocks
  #: (Gloeckle et al., 2024).
  MTP_KIND: layers.MtpKind = "sequential"
  #: Factor of their mean loss, which is added to that of the next token.
  MTP_LOSS_SCALING_FACTOR: ranges.Weight = 0.1
  DROPOUT_PROB: ranges.Probability = 0.0  #: Dropout of each block's attention and MLP outputs.
  EMBEDDING_DROPOUT_PROB: ranges.Probability = 0.0  #: Dropout of the embeddings.
  USE_REPEATED_LAYER: bool | None = None  #: Scan over layers. None: if there are several devices.
  #: Activations saved for the backward pass; the rest is recomputed. OFFLOAD_...: in host memory.
  CHECKPOINT_POLICY: Policy = "SAVE_EVERYTHING"
  #: Attention kernel. auto: ring if the mesh axis context is larger than 1 and scores have no bias,
  #: else cudnn, splash or flash_cpu if supported, else xla on CPUs and xla_chunked elsewhere.
  ATTENTION_KERNEL: layers.KernelName = "auto"
  #: Maximum number of documents per packed sequence with cudnn attention.
  MAX_SEGMENTS_PER_ROW: ranges.Size = 64

  def model(self) -> fdl.Config[layers.Decoder]:
    """Returns the model; its output projection is the embedding table."""
    return fdl.Config(
      layers.Decoder,
      vocab_size=self.VOCAB_SIZE,
      dim=self.MODEL_DIMS,
      embedding=fdl.Partial(layers.Embedding, init=self.init()),
      dropout=self.dropout(self.EMBEDDING_DROPOUT_PROB),
      stack=self.stack(),
      norm=self.norm(),
    )

  def stack(self) -> fdl.Partial[layers.Stack]:
    """Returns the layers: repeats of the pattern, then its first layers for the remainder.

    Raises:
      UserError: The pattern is not a list of layers, or empty.
    """
    pattern: Any = self.pattern()
    if not isinstance(pattern, list | tuple) or not pattern:
      raise UserError(
        f"what {type(self).__name__}.pattern() returns is {graph_types.shown(pattern)}: expected a"
        " list of at least one layer."
      )
    repeats, rest = divmod(self.NUM_LAYERS, len(pattern))
    stack = fdl.Partial(layers.Stack, pattern=pattern, repeats=repeats)
    if rest:
      stack.epilogue = self.pattern()[:rest]
    return stack

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    """Returns the layers that are repeated."""
    return [self.block()]

  def block(self) -> fdl.Partial[layers.Block]:
    """Returns one layer."""
    return fdl.Partial(
      layers.Block,
      norm=self.norm(),
      attention=self.attention(),
      mlp=self.mlp(),
      dropout=self.dropout(self.DROPOUT_PROB),
    )

  def attention(self) -> fdl.Partial[layers.Attention]:
    """Returns the attention of a block."""
    return fdl.Partial(
      layers.Attention,
      num_heads=self.NUM_HEADS,
      head_dim=self.head_dim(),
      query=self.linear("query"),
      key=self.linear("key"),
      value=self.linear("value"),
      output=self.linear("output"),
    )

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    """Returns the feed-forward layer of a block."""
    hidden = self.HIDDEN_DIMS
    return fdl.Partial(
      layers.Mlp,
      hidden_dim=4 * self.MODEL_DIMS if hidden is None else hidden,
      up=self.linear("up"),
      down=self.linear("down"),
    )

  def norm(self) -> fdl.Partial:
    """Returns the norm of blocks and of the final output."""
    return fdl.Partial(layers.RmsNorm)

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    """Returns a linear map of the blocks."""
    return fdl.Partial(layers.Linear, role=role, init=self.init())

  def init(self) -> fdl.Partial:
    """Returns the initializer of weights."""
    return fdl.Partial(layers.gaussian, std=self.INIT_STD)

  def dropout(self, rate: float) -> fdl.Partial[layers.Dropout] | None:
    """Returns a dropout layer; None for rate 0."""
    return fdl.Partial(layers.Dropout, rate=rate) if rate else None

  def head_dim(self) -> int:
    """Returns the width of a head.

    Raises:
      UserError: DIMS_PER_HEAD is None, and NUM_HEADS does not divide MODEL_DIMS.
    """
    if self.DIMS_PER_HEAD is not None:
      return self.DIMS_PER_HEAD
    if self.MODEL_DIMS % self.NUM_HEADS:
      raise UserError(
        f"MODEL_DIMS={self.MODEL_DIMS} is not a multiple of NUM_HEADS={self.NUM_HEADS}:"
        " set DIMS_PER_HEAD, or another NUM_HEADS."
      )
    return self.MODEL_DIMS // self.NUM_HEADS
