# SPDX-License-Identifier: Apache-2.0
"""Granite 3.0 to 3.3 (IBM, 2024 and 2025): LLaMA with the scales of muP."""

import dataclasses

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class Granite3(Llama):
  """The dense models of Granite 3."""

  VOCAB_SIZE = 49_159
  MAX_SEQ_LEN = 131_072
  ROPE_THETA = 10_000_000.0
  #: Factor of attention's logits, such as 1 / DIMS_PER_HEAD.
  ATTENTION_SCALE: ranges.Factor = 0.015625
  LOGITS_DIVISOR: ranges.Factor = 8.0  #: Divides the logits of the output projection.
  EMBEDDING_SCALE = 12.0
  RESIDUAL_SCALE = 0.22
  USE_TIED_EMBEDDING = True

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    if self.USE_TIED_EMBEDDING:
      model.embedding.logits_scale = 1 / self.LOGITS_DIVISOR
    else:
      model.head.scale = 1 / self.LOGITS_DIVISOR
    return model

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.scale = self.ATTENTION_SCALE
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    scales = {
      "embedding_multiplier": "EMBEDDING_SCALE",
      "residual_multiplier": "RESIDUAL_SCALE",
      "attention_multiplier": "ATTENTION_SCALE",
      "logits_scaling": "LOGITS_DIVISOR",
    }
    return dataclasses.replace(
      family,
      model_type="granite",
      architecture="GraniteForCausalLM",
      knobs={**family.knobs, **scales},
      defaults={**family.defaults, **dict.fromkeys(scales, 1.0)},
    )


@register
class Granite33_2B(datasets.Synthetic, Granite3):
  """Granite 3.3 2B. 2,533,539,840 parameters."""

  NUM_LAYERS = 40
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  NUM_HEADS = 32
  NUM_KV_HEADS = 8


@register
class Granite33_8B(datasets.Synthetic, Granite3):
  """Granite 3.3 8B. 8,170,864,640 parameters."""

  NUM_LAYERS = 40
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 12_800
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  ATTENTION_SCALE = 0.0078125
  LOGITS_DIVISOR = 16.0
