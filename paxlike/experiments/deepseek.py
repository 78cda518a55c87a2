# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3 (DeepSeek-AI, 2024): latent attention, a shared expert besides the routed ones, and a
router that is balanced by a bias instead of a loss. The first layers have no experts.

`MTP_NUM_LAYERS=1` adds its module for multi-token prediction, which it trained with the factors 0.3
and, for the last third of the tokens, 0.1.
"""

import math

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Matrix, PerExpert, Rules, Same
from paxlike.config import ranges
from paxlike.errors import UserError
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.moe import SIGMOID_MOE_KEYS, SigmoidMoe
from paxlike.registry import register


class DeepSeekMoe(SigmoidMoe):
  """A mixin: the experts of DeepSeek-V3, in all layers but the first ones."""

  NUM_DENSE_LAYERS: ranges.NonNegative = 3  #: First layers, without experts.
  NUM_EXPERTS = 256
  NUM_EXPERTS_PER_TOKEN = 8
  NUM_SHARED_EXPERTS: ranges.Size = 1  #: Experts that process every token.
  NUM_EXPERT_GROUPS = 8
  NUM_EXPERT_GROUPS_PER_TOKEN = 4
  BALANCE_LOSS_WEIGHT = 0.0

  def stack(self) -> fdl.Partial[layers.Stack]:
    repeats = self.NUM_LAYERS - self.NUM_DENSE_LAYERS
    if repeats < 1:
      raise UserError(
        f"NUM_LAYERS={self.NUM_LAYERS} must be more than NUM_DENSE_LAYERS={self.NUM_DENSE_LAYERS}."
      )
    dense = self.block()
    dense.mlp = self.dense_mlp()
    return fdl.Partial(
      layers.Stack,
      prologue=[dense] * self.NUM_DENSE_LAYERS,
      pattern=self.pattern(),
      repeats=repeats,
    )

  def mlp(self) -> fdl.Partial:
    moe = super().mlp()
    moe.shared.hidden_dim = self.NUM_SHARED_EXPERTS * moe.experts.hidden_dim
    return moe


def with_experts(family: hugging_face.Family) -> hugging_face.Family:
  """Returns a family of Hugging Face with the experts of `DeepSeekMoe`, and their MTP layers."""
  return family.variant(
    knobs={
      "first_k_dense_replace": "NUM_DENSE_LAYERS",
      **SIGMOID_MOE_KEYS,
      "n_shared_experts": ("NUM_SHARED_EXPERTS", 1),
      "num_nextn_predict_layers": "MTP_NUM_LAYERS",
    },
    defaults={
      "num_experts_per_tok": 8,
      "num_nextn_predict_layers": 0,  # An import counts those in the files.
    },
    nullable={"num_nextn_predict_layers"},
    fixed={"norm_topk_prob": True},
    neutral={"num_mtp_layers"},
    aliases={"num_local_experts": "n_routed_experts"},
    rules=_rules_of_experts(),
    mtp={
      "projection.w": Matrix("model.layers.{}.eh_proj.weight"),
      "embedding_norm.scale": Same("model.layers.{}.enorm.weight"),
      "hidden_norm.scale": Same("model.layers.{}.hnorm.weight"),
      "norm.scale": Same("model.layers.{}.shared_head.norm.weight"),
    },
    mtp_copies={
      "embedding.table": Same("model.layers.{}.embed_tokens.weight"),
      "head.w": Matrix("model.layers.{}.shared_head.head.weight"),
    },
    ignored={r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"},
  )


def _rules_of_experts() -> Rules:
  at = "model.layers.{}.mlp"
  rules: Rules = {
    "stack.{}.mlp.router.w": Matrix(f"{at}.gate.weight"),
    "stack.{}.mlp.router_bias": Same(f"{at}.gate.e_score_correction_bias"),
  }
  for name in ("gate", "up", "down"):
    expert, shared = f"{at}.experts.{{expert}}.{name}", f"{at}.shared_experts.{name}"
    rules[f"stack.{{}}.mlp.experts.{name}.w"] = PerExpert(f"{expert}_proj.weight")
    rules[f"stack.{{}}.mlp.shared.{name}.w"] = Matrix(f"{shared}_proj.weight")
  return rules


class DeepSeek(DeepSeekMoe, Llama):
  """The DeepSeek-V3 family."""

  VOCAB_SIZE = 129_280
  MAX_SEQ_LEN = 163_840
  DIMS_PER_HEAD = 128
  DIMS_PER_ROPE_HEAD: ranges.Size = 64  #: Rotary dims of a head's query and key.
  DIMS_PER_VALUE_HEAD: ranges.Size = 128  #: Width of a head's value.
  LATENT_DIMS: ranges.Size = 512  #: Rank of the latent of keys and values.
  #: Rank of the latent of queries. None: queries have no latent.
  QUERY_LATENT_DIMS: ranges.Size | None = 1536
  NORM_EPSILON = 1e-6
  ROPE_SCALING = "yarn"
  ROPE_FACTOR = 40.0
  ROPE_ORIGINAL_LENGTH = 4096
  #: Rotations within the original context from which YaRN leaves a frequency (beta_fast).
  ROPE_FAST: ranges.PositiveFloat = 32.0

  def attention(self) -> fdl.Partial[layers.LatentAttention]:
    if self.NUM_KV_HEADS not in (None, self.NUM_HEADS):
      raise UserError(
        f"NUM_KV_HEADS={self.NUM_KV_HEADS}: latent attention has a key for each of its"
        f" {self.NUM_HEADS} heads; leave it None."
      )
    return fdl.Partial(
      layers.LatentAttention,
      num_heads=self.NUM_HEADS,
      head_dim=self.head_dim(),
      rope_dim=self.DIMS_PER_ROPE_HEAD,
      value_dim=self.DIMS_PER_VALUE_HEAD,
      rank=self.LATENT_DIMS,
      query_rank=self.QUERY_LATENT_DIMS,
      query=self.linear("query"),
      query_down=None if self.QUERY_LATENT_DIMS is None else self.linear("query_down"),
      latent=self.linear("latent"),
      key_value=self.linear("key_value"),
      output=self.linear("output"),
      norm=fdl.Partial(layers.RmsNorm, epsilon=1e-6),
      rope=self.rope(),
      scale=self._rope_magnitude() ** 2 / math.sqrt(self.head_dim() + self.DIMS_PER_ROPE_HEAD),
    )

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope = super().rope()
    rope.interleaved = True
    rope.magnitude = 1.0
    if self.ROPE_FACTOR is not None and self.ROPE_SCALING == "yarn":
      rope.scaling.fast = self.ROPE_FAST
    return rope

  def _rope_magnitude(self) -> float:
    """Returns YaRN's magnitude, which here scales whole queries and keys."""
    return self.yarn_magnitude() if self.ROPE_SCALING == "yarn" else 1.0

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    attention = "stack.{}.attention"
    return with_experts(super().hugging_face()).variant(
      lacking=("head_dim", "attention_bias", f"{attention}.key.w", f"{attention}.value.w"),
      model_type="deepseek_v3",
      other_types=("kimi_k2",),  # See kimi.py.
      architecture="DeepseekV3ForCausalLM",
      knobs={
        "qk_nope_head_dim": ("DIMS_PER_HEAD", 128),
        "qk_rope_head_dim": ("DIMS_PER_ROPE_HEAD", 64),
        "v_head_dim": ("DIMS_PER_VALUE_HEAD", 128),
        "kv_lora_rank": ("LATENT_DIMS", 512),
        "q_lora_rank": ("QUERY_LATENT_DIMS", 1536),
      },
      defaults={
        "num_key_value_heads": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
      },
      nullable={"q_lora_rank"},
      fixed={
        "rope_interleave": True,
        "moe_layer_freq": 1,  # These three are in the published configuration.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
      },
      neutral={"qk_head_dim", "ep_size", "seq_aux", "aux_loss_alpha", "router_aux_loss_coef"},
      equal={"head_dim": "qk_rope_head_dim"},
      rope=HfRope(
        types=("default", "yarn"),
        fixed={"mscale": 1.0, "mscale_all_dim": 1.0},
        numbers={"yarn": {"beta_fast": ("ROPE_FAST", 32.0)}},
      ),
      rules=_rules(),
      without={
        f"{attention}.query_down.w": {
          f"{attention}.query.w": Matrix("model.layers.{}.self_attn.q_proj.weight")
        }
      },
    )


def _rules() -> Rules:
  """Returns the rules of latent attention."""
  attention = "model.layers.{}.self_attn"
  return {
    "stack.{}.attention.query_down.w": Matrix(f"{attention}.q_a_proj.weight"),
    "stack.{}.attention.query_norm.scale": Same(f"{attention}.q_a_layernorm.weight"),
    "stack.{}.attention.query.w": Matrix(f"{attention}.q_b_proj.weight"),
    "stack.{}.attention.latent.w": Matrix(f"{attention}.kv_a_proj_with_mqa.weight"),
    "stack.{}.attention.latent_norm.scale": Same(f"{attention}.kv_a_layernorm.weight"),
    "stack.{}.attention.key_value.w": Matrix(f"{attention}.kv_b_proj.weight"),
  }


@register
class DeepSeekV3(datasets.Synthetic, DeepSeek):
  """DeepSeek-V3 671B. 671,026,404,352 parameters, router biases not counted."""

  NUM_LAYERS = 61
  MODEL_DIMS = 7168
  HIDDEN_DIMS = 18432
  EXPERT_DIMS = 2048
  NUM_HEADS = 128
