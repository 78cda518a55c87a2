# SPDX-License-Identifier: Apache-2.0
"""The nanoGPT speedrun: GPT-2 small to a loss of 3.28 on FineWeb in as few steps as possible.

Source: github.com/KellerJordan/modded-nanogpt, records/track_3_optimization, whose architecture,
data and batch are fixed and whose optimizer is not.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.config import ranges
from paxlike.data.token_shards import TokenShards
from paxlike.experiment import Experiment
from paxlike.layers.attention import rope
from paxlike.registry import register
from paxlike.training.evaluation import EvalSet


class FineWebTokens(Experiment):
  """FineWeb in GPT-2 tokens, as modded-nanogpt's `data/cached_fineweb10B.py` downloads them."""

  DATA_PATH: ranges.Path | None = None  #: Folder of fineweb_train_*.bin. Required.

  def train_data(self) -> fdl.Config:
    return self.tokens("fineweb_train_")

  def eval_data(self) -> dict[str, fdl.Config[EvalSet]]:
    return {"fineweb": self.eval_set(self.tokens("fineweb_val_"), num_batches=20)}

  def tokens(self, prefix: str) -> fdl.Config[TokenShards]:
    """Returns the tokens of the files whose names begin with `prefix`."""
    return fdl.Config(
      TokenShards,
      path=self.DATA_PATH,
      prefix=prefix,
      seq_len=self.MAX_SEQ_LEN,
      vocab_size=self.VOCAB_SIZE,
    )


@register
class Speedrun(FineWebTokens):
  """The tuned baseline, result 36: 3,250 steps with Muon. Published for AdamW: 5,625 steps.

  Published on 8 H100, with 64 sequences each, on which the eval set has its 10M tokens. Rotary
  positions of half of each head's dims, QK-norm, squared ReLU, zero output projections, and a norm
  of the embeddings. Two differences: the original caps logits by x / sqrt(1 + x^2), here by tanh;
  its Newton-Schulz has 12 steps with coefficients of its own, here 5 with Muon's.
  """

  VOCAB_SIZE = 50304
  MAX_SEQ_LEN = 1024
  NUM_LAYERS = 12
  NUM_HEADS = 6
  MODEL_DIMS = 768
  DIMS_PER_HEAD = 128
  LOGITS_CAP: ranges.Cap = 15.0  #: Bound of the logits.
  ICI_MESH_SHAPE = (-1, 1, 1)
  PERCORE_BATCH_SIZE = 64
  MAX_STEPS = 3250
  OPTIMIZER = "muon"
  MUON_SCALE = "width"
  LEARNING_RATE = 0.025
  LEARNING_RATE_SCALES = {  # AdamW's rates are then 0.7, 0.004, and 0.015 for norms and biases.
    r"^embedding\.table$": 28.0,
    r"^head\.w$": 0.16,
    r"(\.b|\.scale)$": 0.6,
  }
  WEIGHT_DECAY = 0.05
  WEIGHT_DECAY_SCALES = {r"^embedding\.table$|^head\.w$|\.b$|\.scale$": 0.02}
  ADAM_BETA1 = 0.8
  ADAM_EPSILON = 1e-10
  CLIP_GRADIENT_NORM_TO_VALUE = None
  LR_SCHEDULE = "wsd"
  LR_WSD_SHAPE = "linear"
  LR_WSD_DECAY = 0.7
  LR_WARMUP = 0
  EVAL_INTERVAL_STEPS = 125
  CHECKPOINT_EVERY_N_STEPS = 1000

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    model.embedding.init = fdl.Partial(layers.gaussian, std=1.0)
    model.embedding_norm = self.norm()
    model.head = self.linear("head")
    model.soft_cap = self.LOGITS_CAP
    return model

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.qk_norm = fdl.Partial(layers.UnscaledRmsNorm)
    attention.rope = fdl.Partial(layers.Rope, scaling=fdl.Partial(rope.half, slowest=1 / 1024))
    attention.scale = 0.12
    return attention

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().mlp()
    mlp.activation = layers.squared_relu
    return mlp

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    linear.use_bias = True
    is_zero = role in ("output", "down", "head")  # Each block begins as the identity.
    linear.init = fdl.Partial(layers.zeros) if is_zero else self._init()
    return linear

  def _init(self) -> fdl.Partial:
    return fdl.Partial(layers.scaled, init=fdl.Partial(layers.gaussian_fan_in), by=3**-0.5)
