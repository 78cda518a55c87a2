# SPDX-License-Identifier: Apache-2.0
"""The text models of Gemma 4 (Gemma Team, 2026): 31B, 12B, 26B-A4B, E2B and E4B.

Four or five local layers per global one, which is also the last. Queries, keys and values are
normalized; logits are not scaled. Global layers have wider heads, whose values are their keys in
the larger models, and rotate a quarter of the pairs of dims. A stored factor multiplies the output
of each block.

26B-A4B has experts beside the MLP of each layer. In E2B and E4B, the later layers attend to the
keys and values of earlier ones, and every layer has an embedding of the tokens of its own.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets, gemma4_hf
from paxlike.experiments.gemma import Gemma
from paxlike.experiments.moe import Moe
from paxlike.registry import register


class Gemma4(Moe, Gemma):
  """Text models of Gemma 4. DIMS_PER_HEAD and NUM_KV_HEADS are those of local layers."""

  VOCAB_SIZE = 262_144
  MAX_SEQ_LEN = 262_144
  ROPE_THETA = 1_000_000.0
  GLOBAL_EVERY: ranges.Depth = 6  #: One layer in this many, the last of them, is global.
  WINDOW: ranges.Positive = 1024  #: Attention window of local layers, including the current token.
  LOCAL_ROPE_THETA: ranges.Base = 10_000.0  #: ROPE_THETA of local layers.
  ROPE_SHARE: ranges.Share = 0.25  #: Share of the pairs of dims that global layers rotate.
  DIMS_PER_GLOBAL_HEAD: ranges.Size = 512  #: Width of a head of global layers.
  #: Number of KV heads of global layers. None: NUM_KV_HEADS.
  NUM_GLOBAL_KV_HEADS: ranges.Size | None = None
  USE_KEYS_AS_VALUES: bool = True  #: Whether the values of global layers are their keys.
  #: Layers with keys and values of their own, the first ones; later layers attend to those of the
  #: last of these that is local, or global, as they are. None: all.
  NUM_KV_LAYERS: ranges.Depth | None = None
  USE_DOUBLE_WIDE_MLP: bool = False  #: 2 x HIDDEN_DIMS in layers after the first NUM_KV_LAYERS.
  #: Width of the embedding of each token for each layer. 0: there is none.
  PER_LAYER_DIMS: ranges.NonNegative = 0
  NUM_EXPERTS: ranges.NonNegative = 0  #: Experts per layer, beside its MLP. 0: none.
  NUM_EXPERTS_PER_TOKEN: ranges.NonNegative = 0  #: Experts per token.
  BALANCE_LOSS_WEIGHT = 0.001
  LOGITS_SOFT_CAP: ranges.Cap | None = 30.0  #: Soft cap of output logits.

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.soft_cap = self.LOGITS_SOFT_CAP
    if self.PER_LAYER_DIMS:
      model.layer_inputs = fdl.Partial(
        layers.PerLayerEmbedding,
        width=self.PER_LAYER_DIMS,
        init=self.init(),
        projection=self.linear("layer_projection"),
        norm=self.norm(),
      )
    return model

  def norm(self) -> fdl.Partial:
    return fdl.Partial(layers.RmsNorm, epsilon=self.NORM_EPSILON)

  def stack(self) -> fdl.Partial[layers.Stack]:
    own, double = self.NUM_KV_LAYERS or self.NUM_LAYERS, self.USE_DOUBLE_WIDE_MLP
    if own < self.NUM_LAYERS:
      return self._sharing_stack(own, double=double)
    stack = super().stack()
    if rest := list(getattr(stack, "epilogue", ())):
      stack.epilogue = [*rest[:-1], self.block()]
    return stack

  def _sharing_stack(self, own: int, *, double: bool) -> fdl.Partial[layers.Stack]:
    """Returns layers of which the first `own` have keys and values of their own.

    Raises:
      UserError: None of these is local, or global, and a later one is.
    """
    every, count = self._period(), self.NUM_LAYERS
    kinds = [gemma4_hf.kind(layer, every) for layer in range(count - 1)] + [gemma4_hf.GLOBAL]
    if lacking := set(kinds) - set(kinds[:own]):
      raise UserError(
        f"NUM_KV_LAYERS={own}: none of these layers has {lacking.pop()}, of which later layers"
        f" would need keys and values; GLOBAL_EVERY={every}."
      )
    prologue = [self._layer(kind) for kind in kinds[:own]]
    for kind in set(kinds):
      last = own - 1 - kinds[:own][::-1].index(kind)
      fdl.update_callable(prologue[last].attention, layers.KvSource)

    def reader(kind: str) -> fdl.Partial[layers.Block]:
      block = self._layer(kind)
      attention, mlp = block.attention, block.mlp
      attention.key = attention.value = attention.value_norm = None
      if double:
        dense = mlp.shared if self.NUM_EXPERTS else mlp
        dense.hidden_dim = 2 * dense.hidden_dim
      return block

    repeats, rest = divmod(count - own, every)
    if not rest and count % every:  # The last repeat ends with another kind.
      repeats, rest = repeats - 1, every
    return fdl.Partial(
      layers.Stack,
      prologue=prologue,
      pattern=[reader(gemma4_hf.kind(layer, every)) for layer in range(own, own + every)],
      repeats=repeats,
      epilogue=[reader(kind) for kind in kinds[count - rest :]],
    )

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    every = self._period()
    return [self._layer(gemma4_hf.kind(layer, every)) for layer in range(every)]

  def _period(self) -> int:
    """Returns GLOBAL_EVERY, or the number of layers if there are fewer: the last one is global."""
    return min(self.GLOBAL_EVERY, self.NUM_LAYERS)

  def _layer(self, kind: str) -> fdl.Partial[layers.Block]:
    return self.block() if kind == gemma4_hf.GLOBAL else self.local_block()

  def block(self) -> fdl.Partial[layers.Block]:
    block = self.local_block()
    attention = block.attention
    attention.window = None
    attention.head_dim = self.DIMS_PER_GLOBAL_HEAD
    attention.num_kv_heads = self.NUM_GLOBAL_KV_HEADS or self.NUM_KV_HEADS
    attention.rope = self.rope()
    if self.USE_KEYS_AS_VALUES:
      attention.value = None
    return block

  def local_block(self) -> fdl.Partial[layers.Block]:
    """Returns a layer with sliding-window attention."""
    block = super().block()
    block.post_norm = self.norm()
    block.output_scale = fdl.Partial(layers.constant, value=1.0)
    block.attention.window = self.WINDOW
    block.attention.rope = fdl.Partial(layers.Rope, theta=self.LOCAL_ROPE_THETA)
    if self.PER_LAYER_DIMS:
      block.per_layer_input = fdl.Partial(
        layers.PerLayerInput,
        width=self.PER_LAYER_DIMS,
        gate=self.linear("layer_gate"),
        output=self.linear("layer_output"),
        norm=self.norm(),
      )
    return block

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.qk_norm = self.norm()
    attention.value_norm = fdl.Partial(layers.UnscaledRmsNorm, epsilon=self.NORM_EPSILON)
    attention.scale = 1.0
    return attention

  def mlp(self) -> fdl.Partial:
    if not self.NUM_EXPERTS:
      return self.dense_mlp()
    moe = super().mlp()
    moe.shared = self.dense_mlp()
    moe.branch_norm, moe.router_norm = self.norm(), self.norm()
    moe.router.scale = self.MODEL_DIMS**-0.5
    moe.expert_scale = fdl.Partial(layers.constant, value=1.0)
    return moe

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope = super().rope()
    if self.ROPE_FACTOR is not None:
      raise UserError("ROPE_FACTOR: Gemma 4 has no scaling of rotary positions; leave it None.")
    rope.scaling = fdl.Partial(layers.rope.proportional, share=self.ROPE_SHARE)
    return rope

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    return gemma4_hf.family(super().hugging_face())


class Gemma4Unified(Gemma4):
  """Gemma 4 12B, which Hugging Face has as a model of its own."""

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    return gemma4_hf.unified(super().hugging_face())


@register
class Gemma4_31B(datasets.Synthetic, Gemma4):
  """The text model of Gemma 4 31B. 30,697,345,280 parameters."""

  NUM_LAYERS = 60
  MODEL_DIMS = 5376
  HIDDEN_DIMS = 21504
  NUM_HEADS = 32
  NUM_KV_HEADS = 16
  NUM_GLOBAL_KV_HEADS = 4


@register
class Gemma4_12B(datasets.Synthetic, Gemma4Unified):
  """The text model of Gemma 4 12B. 11,907,350,272 parameters."""

  NUM_LAYERS = 48
  MODEL_DIMS = 3840
  HIDDEN_DIMS = 15_360
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  NUM_GLOBAL_KV_HEADS = 1


@register
class Gemma4_26B_A4B(datasets.Synthetic, Gemma4):
  """The text model of Gemma 4 26B-A4B. 25,233,141,760 parameters."""

  NUM_LAYERS = 30
  MODEL_DIMS = 2816
  HIDDEN_DIMS = 2112
  NUM_HEADS = 16
  NUM_KV_HEADS = 8
  NUM_GLOBAL_KV_HEADS = 2
  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 8
  EXPERT_DIMS = 704


@register
class Gemma4_E2B(datasets.Synthetic, Gemma4):
  """The text model of Gemma 4 E2B, half of it per-layer embeddings. 4,628,569,344 parameters."""

  MAX_SEQ_LEN = 131_072
  NUM_LAYERS = 35
  GLOBAL_EVERY = 5
  MODEL_DIMS = 1536
  HIDDEN_DIMS = 6144
  USE_DOUBLE_WIDE_MLP = True
  NUM_HEADS = 8
  NUM_KV_HEADS = 1
  USE_KEYS_AS_VALUES = False
  WINDOW = 512
  NUM_KV_LAYERS = 15
  PER_LAYER_DIMS = 256


@register
class Gemma4_E4B(datasets.Synthetic, Gemma4):
  """The text model of Gemma 4 E4B. 7,463,013,376 parameters."""

  MAX_SEQ_LEN = 131_072
  NUM_LAYERS = 42
  MODEL_DIMS = 2560
  HIDDEN_DIMS = 10_240
  NUM_HEADS = 8
  NUM_KV_HEADS = 2
  USE_KEYS_AS_VALUES = False
  WINDOW = 512
  NUM_KV_LAYERS = 24
  PER_LAYER_DIMS = 256
