# SPDX-License-Identifier: Apache-2.0
"""Mistral 7B (Jiang et al., 2023) and Mixtral (Jiang et al., 2024).

Mistral is LLaMA with sliding-window attention; Mixtral has eight experts per layer, two per token.
"""

import dataclasses

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Matrix, PerExpert
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.moe import Moe
from paxlike.registry import register


class Mistral(Llama):
  """The Mistral family."""

  #: Attention window in tokens, including the current one. None: full attention.
  WINDOW: ranges.Positive | None = 4096

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
      knobs={
        **{key: knob for key, knob in family.knobs.items() if key != "attention_bias"},
        "sliding_window": "WINDOW",
      },
      defaults={**family.defaults, "num_key_value_heads": 8, "sliding_window": 4096},
      nullable=family.nullable | {"sliding_window"},
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


class Mixtral(Moe, Mistral):
  """Mixtral: Mistral with experts and full attention."""

  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 32768
  NUM_KV_HEADS = 8
  ROPE_THETA = 1_000_000.0
  WINDOW = None

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    at = "model.layers.{}.block_sparse_moe"
    return dataclasses.replace(
      family,
      model_type="mixtral",
      architecture="MixtralForCausalLM",
      knobs={
        **family.knobs,
        "intermediate_size": "EXPERT_DIMS",
        "num_local_experts": "NUM_EXPERTS",
        "num_experts_per_tok": "NUM_EXPERTS_PER_TOKEN",
        "router_aux_loss_coef": "BALANCE_LOSS_WEIGHT",
      },
      defaults={
        **family.defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
      },
      neutral=frozenset({"router_jitter_noise"}),  # For training only.
      aliases={"num_experts": "num_local_experts"},
      rope=HfRope(theta=1_000_000.0),
      rules={
        **family.rules,
        "stack.{}.mlp.router.w": Matrix(f"{at}.gate.weight"),
        "stack.{}.mlp.experts.gate.w": PerExpert(f"{at}.experts.{{expert}}.w1.weight"),
        "stack.{}.mlp.experts.up.w": PerExpert(f"{at}.experts.{{expert}}.w3.weight"),
        "stack.{}.mlp.experts.down.w": PerExpert(f"{at}.experts.{{expert}}.w2.weight"),
      },
    )


@register
class Mixtral8x7B(datasets.Synthetic, Mixtral):
  """Mixtral 8x7B. 46,702,792,704 parameters, 12,879,925,248 of them active per token."""

  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 14336
  NUM_HEADS = 32


@register
class Mixtral8x22B(datasets.Synthetic, Mixtral):
  """Mixtral 8x22B. 140,620,634,112 parameters."""

  MAX_SEQ_LEN = 65536
  NUM_LAYERS = 56
  MODEL_DIMS = 6144
  HIDDEN_DIMS = 16384
  NUM_HEADS = 48
