# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B (Jiang et al., 2023): LLaMA with a sliding window."""

import dataclasses

import fiddle as fdl

from paxlike import hugging_face, layers
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class Mistral(Llama):
  """The family."""

  WINDOW: int | None = 4096  #: Tokens that a token sees, itself among them. None: all before it.

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.window = self.WINDOW
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return dataclasses.replace(
      family,
      model_type="mistral",
      architecture="MistralForCausalLM",
      knobs={**family.knobs, "sliding_window": "WINDOW"},
      defaults={**family.defaults, "sliding_window": None},
      fixed={"hidden_act": "silu"},
    )


@register
class Mistral7B(datasets.Synthetic, Mistral):
  """Mistral 7B v0.1. 7,241,732,096 parameters."""

  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 8192
  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
