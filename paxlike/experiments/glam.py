# SPDX-License-Identifier: Apache-2.0
"""GLaM (Du et al., 2021) as Pax trained it on GPUs: 64 experts in every other layer.

RMSNorm with epsilon 1e-6, no biases; attention with T5's relative bias, an extra logit of 0 and
unscaled queries; dense layers with GeGLU, experts with ReLU; tied embeddings with a standard
deviation of 1, and logits divided by sqrt(MODEL_DIMS).
"""

import math

import fiddle as fdl
import jax

from paxlike import layers
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.moe import Moe
from paxlike.registry import register


class GLaM(Moe):
  """The GLaM family; subclasses set the sizes."""

  VOCAB_SIZE = 50304
  MAX_SEQ_LEN = 2048
  NUM_EXPERTS = 64
  MOE_DISPATCH = "capacity"
  CAPACITY_FACTOR = 1.0  # 2.0 in Pax, where the factor includes the two experts per token.
  INIT_STD = 1.0
  RELATIVE_BUCKETS: ranges.Buckets = 32  #: Buckets of relative positions.
  RELATIVE_DISTANCE: ranges.Size = 128  #: Distance from which positions share a bucket.

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.embedding.init = fdl.Partial(layers.gaussian, std=self.INIT_STD)
    model.embedding.logits_scale = 1 / math.sqrt(self.MODEL_DIMS)
    return model

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    dense = self.block()
    dense.mlp = self.dense_mlp()
    dense.mlp.gate = self.linear("gate")
    dense.mlp.activation = layers.geglu
    return [self.block(), dense]

  def mlp(self) -> fdl.Partial[layers.Moe]:
    moe = super().mlp()
    moe.experts.activation = jax.nn.relu
    moe.balance_loss = self.BALANCE_LOSS_WEIGHT / math.ceil(self.NUM_LAYERS / 2)
    moe.balanced_choices = 1
    return moe

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.scale = 1.0
    attention.extra_logit = 0.0
    attention.relative_bias = fdl.Partial(
      layers.RelativeBias,
      num_buckets=self.RELATIVE_BUCKETS,
      max_distance=self.RELATIVE_DISTANCE,
    )
    return attention

  def init(self) -> object:
    return layers.gaussian_fan_in


class GLaM126M64E(GLaM):
  """1,921,670,400 parameters. Published on 64 H100, FSDP: LAMBADA 46.15 % at GPT 126M's compute."""

  NUM_LAYERS = 12
  NUM_HEADS = 12
  MODEL_DIMS = 768
  HIDDEN_DIMS = 3072
  ICI_MESH_SHAPE = (1, -1, 1)
  PERCORE_BATCH_SIZE = 8
  MAX_STEPS = 600_000
  LEARNING_RATE = 6e-4
  LR_COS_WARMUP = 636
  LR_COS_DECAY_START = 637
  LR_COS_DECAY_END = 500_000


class GLaM64B64E(GLaM):
  """1,142,891,356,160 parameters. Pax's code has 1,024 tokens per sequence, its docs 2,048."""

  NUM_LAYERS = 64
  NUM_HEADS = 64
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 32768
  USE_REPEATED_LAYER = True
  CHECKPOINT_POLICY = "SAVE_NOTHING"
  ICI_MESH_SHAPE = (1, 1, 8)
  DCN_MESH_SHAPE = (1, -1, 1)
  PERCORE_BATCH_SIZE = 4
  MAX_STEPS = 75_000
  LEARNING_RATE = 2e-5
  LR_COS_WARMUP = 398
  LR_COS_DECAY_START = 399
  LR_COS_DECAY_END = 162_900
  ADAM_BETA1 = 0.0
  ADAM_BETA2 = 0.99
  CHECKPOINT_EVERY_N_STEPS = 100
  CHECKPOINT_MAX_TO_KEEP = 2
  SUMMARY_INTERVAL_STEPS = 10


@register
class PileGLaM126M64E(datasets.Pile, GLaM126M64E):
  """GLaM 126M/64E on the Pile."""


@register
class PileGLaM64B64E(datasets.Pile, GLaM64B64E):
  """GLaM 64B/64E on the Pile."""


@register
class LambadaGLaM126M64E(datasets.Lambada, GLaM126M64E):
  """GLaM 126M/64E zero-shot on LAMBADA, from the run of `PileGLaM126M64E`."""

  MOE_DISPATCH = "dropless"  # On short sequences, capacity would drop too many tokens.


@register
class LambadaGLaM64B64E(datasets.Lambada, GLaM64B64E):
  """GLaM 64B/64E zero-shot on LAMBADA, from the run of `PileGLaM64B64E`."""

  MOE_DISPATCH = "dropless"


@register
class SyntheticGLaM126M64E(datasets.Synthetic, GLaM126M64E):
  """GLaM 126M/64E on synthetic tokens, to measure speed."""

  MAX_STEPS = 100


@register
class SyntheticGLaM64B64E(datasets.Synthetic, GLaM64B64E):
  """GLaM 64B/64E on synthetic tokens, to measure speed."""

  MAX_STEPS = 100
