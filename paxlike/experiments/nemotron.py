# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H (NVIDIA, 2025, arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3 Nano.

Each layer is either Mamba-2, attention without positions, or a feed-forward layer with squared
ReLU. Those of Nemotron 3 have experts.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerKinds
from paxlike.checkpoints.hf_rules import Matrix, PerExpert, Rules, Same
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.mamba import LETTERS, NO_STEP_LIMITS, Hybrid, hybrid_rules, kinds
from paxlike.experiments.moe import SIGMOID_MOE_KEYS, SigmoidMoe
from paxlike.registry import register


class NemotronH(SigmoidMoe, Hybrid):
  """The Nemotron-H family."""

  VOCAB_SIZE = 131_072
  MAX_SEQ_LEN = 8192
  DIMS_PER_HEAD = 128
  NUM_KV_HEADS = 8
  MAMBA_NUM_GROUPS = 8
  MAMBA_LEAST_STEP: ranges.NonNegativeFloat = 0.001  #: Lower bound of Mamba-2's steps.
  NUM_EXPERTS = 128
  NUM_EXPERTS_PER_TOKEN = 6
  EXPERT_DIMS = 1856
  SHARED_EXPERT_DIMS: ranges.Size = 3712  #: Width of the expert that processes every token.
  BALANCE_LOSS_WEIGHT = 1e-4

  def mixer(self, kind: str) -> fdl.Partial | None:
    return super().mixer(kind) if kind in ("mamba", "attention") else None

  def feed_forward(self, kind: str) -> fdl.Partial | None:
    match kind:
      case "mlp":
        return self.dense_mlp()
      case "moe":
        return self.mlp()
      case _:
        return None

  def mamba(self) -> fdl.Partial[layers.Mamba2]:
    mamba = super().mamba()
    mamba.least_step = self.MAMBA_LEAST_STEP
    return mamba

  def dense_mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().dense_mlp()
    mlp.gate = None
    mlp.activation = layers.squared_relu
    return mlp

  def mlp(self) -> fdl.Partial:
    moe = super().mlp()
    moe.shared.hidden_dim = self.SHARED_EXPERT_DIMS
    return moe

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("num_hidden_layers", "rms_norm_eps", "attention_bias", "hidden_act", "stack.*"),
      model_type="nemotron_h",
      architecture="NemotronHForCausalLM",
      knobs={
        "layer_norm_epsilon": ("NORM_EPSILON", 1e-5),
        "mamba_num_heads": ("MAMBA_NUM_HEADS", 128),
        "mamba_head_dim": ("MAMBA_DIMS_PER_HEAD", 64),
        "ssm_state_size": ("MAMBA_STATE_DIMS", 128),
        "n_groups": ("MAMBA_NUM_GROUPS", 8),
        "conv_kernel": ("MAMBA_CONV_TAPS", 4),
        "use_conv_bias": ("MAMBA_CONV_BIAS", True),
        "time_step_min": ("MAMBA_LEAST_STEP", 0.001),
        **SIGMOID_MOE_KEYS,
        "moe_shared_expert_intermediate_size": ("SHARED_EXPERT_DIMS", 7688),
      },
      defaults=_DEFAULTS,
      fixed={
        "attention_bias": False,
        "mamba_hidden_act": "silu",
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_latent_size": None,
        "norm_topk_prob": True,
        "time_step_limit": NO_STEP_LIMITS,
        "use_bias": False,
      },
      neutral=_NEUTRAL,
      aliases={"num_local_experts": "n_routed_experts", "attention_head_dim": "head_dim"},
      layers=LayerKinds(
        names={
          "linear_attention": "mamba",
          "full_attention": "attention",
          **{kind: kind for kind in LETTERS.values()},
        },
        letters=LETTERS,
      ),
      rope=None,
      rules=_rules(),
      copies={"lm_head.weight": "backbone.embeddings.weight"},
      ignored={r"mtp\..*"},
    )


_DEFAULTS = {
  "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504,
  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
  "max_position_embeddings": 4096, "moe_intermediate_size": 7688,
  "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
  "routed_scaling_factor": 1.0,
}  # fmt: skip
# Attention has neither positions nor a window; the other keys are of training, of kernels or of
# layers for multi-token prediction, which transformers ignores.
_NEUTRAL = {
  "chunk_size", "expand", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
  "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts", "norm_eps",
  "num_logits_to_keep", "num_nextn_predict_layers", "rescale_prenorm_residual",
  "residual_in_fp32", "rms_norm_eps", "rope_scaling", "rope_theta", "sliding_window",
  "time_step_floor", "time_step_max", "use_mamba_kernels",
}  # fmt: skip


def _rules() -> Rules:
  """Returns the rule of each weight."""
  at = "backbone.layers.{}"
  mixer, mlp, attention = f"{at}.mixer", "stack.{}.mlp", "stack.{}.attention"
  rules: Rules = {
    "embedding.table": Same("backbone.embeddings.weight"),
    f"{attention}_norm.scale": Same(f"{at}.norm.weight"),
    f"{mlp}_norm.scale": Same(f"{at}.norm.weight"),
    "norm.scale": Same("backbone.norm_f.weight"),
    f"{attention}.output.w": Matrix(f"{mixer}.o_proj.weight", inputs=2),
    f"{mlp}.router.w": Matrix(f"{mixer}.gate.weight"),
    f"{mlp}.router_bias": Same(f"{mixer}.gate.e_score_correction_bias"),
  }
  for name in ("query", "key", "value"):
    rules[f"{attention}.{name}.w"] = Matrix(f"{mixer}.{name[0]}_proj.weight")
  for name in ("up", "down"):
    expert = f"{mixer}.experts.{{expert}}.{name}_proj.weight"
    rules[f"{mlp}.{name}.w"] = Matrix(f"{mixer}.{name}_proj.weight")
    rules[f"{mlp}.shared.{name}.w"] = Matrix(f"{mixer}.shared_experts.{name}_proj.weight")
    rules[f"{mlp}.experts.{name}.w"] = PerExpert(expert)
  return hybrid_rules(mixer, rules)


@register
class NemotronH_8B(datasets.Synthetic, NemotronH):
  """Nemotron-H 8B. 8,100,852,736 parameters."""

  LAYER_TYPES = kinds("M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-")
  NUM_LAYERS = 52
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 21_504
  NUM_HEADS = 32
  MAMBA_NUM_HEADS = 128


@register
class NemotronH_4B(NemotronH_8B):
  """Nemotron-H 4B. 4,489,223,040 parameters."""

  MODEL_DIMS = 3072
  HIDDEN_DIMS = 12_288
  MAMBA_NUM_HEADS = 112


@register
class NemotronH_47B(datasets.Synthetic, NemotronH):
  """Nemotron-H 47B. 46,791,554,816 parameters."""

  LAYER_TYPES = kinds(
    "M-M-M-M-M-M-M-M-M*-M-M-M-M-M-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-M-M---MM---M-M*-M-M-M-M-"
    "M-"
  )
  NUM_LAYERS = 98
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 30_720
  NUM_HEADS = 64
  MAMBA_NUM_HEADS = 256
  MAMBA_STATE_DIMS = 256


@register
class NemotronH_56B(NemotronH_47B):
  """Nemotron-H 56B. 56,324,350,464 parameters."""

  LAYER_TYPES = kinds("M-M-M-M*" + 9 * "-M-M-M-M-M*" + "-M-M-M-M-M-")
  NUM_LAYERS = 118
  HIDDEN_DIMS = 32_768


@register
class NemotronNano2_9B(datasets.Synthetic, NemotronH):
  """Nemotron Nano 2 9B (arXiv:2508.14444). 8,888,227,328 parameters."""

  MAX_SEQ_LEN = 131_072
  LAYER_TYPES = kinds("M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-")
  NUM_LAYERS = 56
  MODEL_DIMS = 4480
  HIDDEN_DIMS = 15_680
  NUM_HEADS = 40
  MAMBA_NUM_HEADS = 128
  MAMBA_DIMS_PER_HEAD = 80


@register
class NemotronNano2_12B(NemotronNano2_9B):
  """Nemotron Nano 2 12B. 12,310,001,152 parameters."""

  LAYER_TYPES = kinds(6 * "M-M-M-M*-" + "M-M-M-M-")
  NUM_LAYERS = 62
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 20_480


@register
class Nemotron3_Nano_30B_A3B(datasets.Synthetic, NemotronH):
  """Nemotron 3 Nano 30B-A3B. 31,577,937,344 parameters, router biases not counted."""

  MAX_SEQ_LEN = 262_144
  LAYER_TYPES = kinds("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME")
  NUM_LAYERS = 52
  MODEL_DIMS = 2688
  HIDDEN_DIMS = 1856
  NUM_HEADS = 32
  NUM_KV_HEADS = 2
