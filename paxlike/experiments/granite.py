# SPDX-License-Identifier: Apache-2.0
"""Granite 3.0 to 3.3 (IBM, 2024 and 2025) and Granite 4.0 (IBM, 2025), with the scales of muP.

Granite 3 is LLaMA. Granite 4.0 has nine Mamba-2 layers per attention layer, which has no positions.
Each of its layers has a feed-forward layer for all tokens and, in the larger models, routed experts
beside it.
"""

from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerKinds
from paxlike.checkpoints.hf_rules import ExpertMatrices, Matrix, Rules, stacked
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.mamba import (
  MAMBA_KEYS,
  NO_STEP_LIMITS,
  Hybrid,
  expansion,
  hybrid_rules,
  kinds,
)
from paxlike.experiments.moe import Moe
from paxlike.registry import register

# Keys of `config.json` for the scales, which are 1 if absent.
_SCALES = {
  "embedding_multiplier": ("EMBEDDING_SCALE", 1.0),
  "residual_multiplier": ("RESIDUAL_SCALE", 1.0),
  "attention_multiplier": ("ATTENTION_SCALE", 1.0),
  "logits_scaling": ("LOGITS_DIVISOR", 1.0),
}


class Granite(Llama):
  """LLaMA with the scales of Granite."""

  MAX_SEQ_LEN = 131_072
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


class Granite3(Granite):
  """The dense models of Granite 3."""

  VOCAB_SIZE = 49_159
  ROPE_THETA = 10_000_000.0

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      model_type="granite",
      architecture="GraniteForCausalLM",
      knobs=_SCALES,
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


class Granite4(Moe, Hybrid, Granite):
  """The Granite 4.0 family."""

  VOCAB_SIZE = 100_352
  LAYER_TYPES: tuple[Literal["mamba", "attention"], ...] = 4 * kinds("MMMMM*MMMM")
  NUM_LAYERS = 40
  NUM_EXPERTS: ranges.NonNegative = 0  #: Routed experts per layer. 0: none.
  NUM_EXPERTS_PER_TOKEN: ranges.NonNegative = 0  #: Routed experts per token.
  LOGITS_DIVISOR = 1.0

  def mlp(self) -> fdl.Partial:
    if not self.NUM_EXPERTS:
      return self.dense_mlp()
    moe = super().mlp()
    moe.shared = self.dense_mlp()
    return moe

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face().variant(lacking=("num_hidden_layers", "stack.{}.mlp.*"))
    return family.variant(
      model_type="granitemoehybrid",
      architecture="GraniteMoeHybridForCausalLM",
      knobs={
        "shared_intermediate_size": ("HIDDEN_DIMS", 1024),
        "intermediate_size": "EXPERT_DIMS",
        "num_local_experts": ("NUM_EXPERTS", 8),
        "num_experts_per_tok": ("NUM_EXPERTS_PER_TOKEN", 2),
        "router_aux_loss_coef": ("BALANCE_LOSS_WEIGHT", 0.001),
        **_SCALES,
        "position_embedding_type": ("USE_ROPE", None),
        **MAMBA_KEYS,
        "mamba_d_head": ("MAMBA_DIMS_PER_HEAD", 64),
      },
      choices={"position_embedding_type": {"nope": False, "rope": True, None: False}},
      derived={"mamba_expand": expansion},
      neutral={"mamba_chunk_size"},
      fixed={
        "mamba_proj_bias": False,
        "normalization_function": "rmsnorm",
        "time_step_limit": NO_STEP_LIMITS,
      },
      layers=LayerKinds(
        names={
          "mamba": "mamba",
          "attention": "attention",
          "linear_attention": "mamba",
          "full_attention": "attention",
        }
      ),
      rules=_rules(family.rules),
    )


def _rules(others: Rules) -> Rules:
  """Returns the rule of each weight, given those of weights outside of feed-forward layers."""
  at, mlp = "model.layers.{}", "stack.{}.mlp"
  moe = f"{at}.block_sparse_moe"
  rules = dict(others)
  for dense in (mlp, f"{mlp}.shared"):
    gate_and_up = {f"{dense}.gate.w": Matrix(""), f"{dense}.up.w": Matrix("")}
    rules |= stacked(f"{at}.shared_mlp.input_linear.weight", gate_and_up)
    rules[f"{dense}.down.w"] = Matrix(f"{at}.shared_mlp.output_linear.weight")
  experts = {f"{mlp}.experts.{name}.w": ExpertMatrices("") for name in ("gate", "up")}
  rules |= stacked(f"{moe}.input_linear.weight", experts, axis=1)
  rules[f"{mlp}.experts.down.w"] = ExpertMatrices(f"{moe}.output_linear.weight")
  rules[f"{mlp}.router.w"] = Matrix(f"{moe}.router.layer.weight")
  return hybrid_rules(f"{at}.mamba", rules)


@register
class Granite4_H_Micro(datasets.Synthetic, Granite4):
  """Granite 4.0 H-Micro. 3,191,396,096 parameters."""

  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  LOGITS_DIVISOR = 8.0


@register
class Granite4_H_Tiny(datasets.Synthetic, Granite4):
  """Granite 4.0 H-Tiny. 6,939,037,248 parameters."""

  MODEL_DIMS = 1536
  HIDDEN_DIMS = 1024
  NUM_HEADS = 12
  NUM_KV_HEADS = 4
  MAMBA_NUM_HEADS = 48
  NUM_EXPERTS = 64
  NUM_EXPERTS_PER_TOKEN = 6
  EXPERT_DIMS = 512
  ATTENTION_SCALE = 0.0078125
  LOGITS_DIVISOR = 6.0


@register
class Granite4_H_Small(datasets.Synthetic, Granite4):
  """Granite 4.0 H-Small. 32,207,337,984 parameters."""

  MODEL_DIMS = 4096
  HIDDEN_DIMS = 1536
  NUM_HEADS = 32
  NUM_KV_HEADS = 8
  MAMBA_NUM_HEADS = 128
  NUM_EXPERTS = 72
  NUM_EXPERTS_PER_TOKEN = 10
  EXPERT_DIMS = 768
  ATTENTION_SCALE = 0.0078125
  LOGITS_DIVISOR = 16.0
