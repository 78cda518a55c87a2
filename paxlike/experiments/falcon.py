# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1 (Technology Innovation Institute, 2025, arXiv:2507.22448).

Attention and Mamba-2 side by side in every layer, and a factor for each linear map, by which muP
scales its learning rate.
"""

import dataclasses

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Rules, Same
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.mamba import MAMBA_KEYS, NO_STEP_LIMITS, Mamba, mamba_rules
from paxlike.registry import register

_SECTIONS = ("output_gate", "value", "key", "query", "step")
_MULTIPLIERS = (
  *("lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
  *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)


class FalconH1(Mamba):
  """The Falcon-H1 family."""

  ROPE_THETA = 1e11
  LM_HEAD_MULTIPLIER: ranges.Factor = 1.0  #: Factor of the logits of the output projection.
  KEY_MULTIPLIER: ranges.Factor = 1.0  #: Factor of attention's keys.
  ATTENTION_IN_MULTIPLIER: ranges.Factor = 1.0  #: Factor of attention's input.
  ATTENTION_OUT_MULTIPLIER: ranges.Factor = 1.0  #: Factor of attention's output.
  SSM_IN_MULTIPLIER: ranges.Factor = 1.0  #: Factor of Mamba-2's input.
  SSM_OUT_MULTIPLIER: ranges.Factor = 1.0  #: Factor of Mamba-2's output.
  #: Factors of Mamba-2's gates, values, keys, queries and steps (z, x, B, C and dt).
  SSM_MULTIPLIERS: tuple[
    ranges.Factor, ranges.Factor, ranges.Factor, ranges.Factor, ranges.Factor
  ] = (1.0, 1.0, 1.0, 1.0, 1.0)
  #: Factors of the MLP's gates and outputs.
  MLP_MULTIPLIERS: tuple[ranges.Factor, ranges.Factor] = (1.0, 1.0)
  USE_MAMBA_NORM: bool = False  #: RMSNorm of Mamba-2's gated outputs.

  def model(self) -> fdl.Config[layers.Decoder]:
    model = super().model()
    if self.USE_TIED_EMBEDDING:
      model.embedding.logits_scale = self.LM_HEAD_MULTIPLIER
    else:
      model.head.scale = self.LM_HEAD_MULTIPLIER
    return model

  def block(self) -> fdl.Partial[layers.Block]:
    block = super().block()
    block.attention = fdl.Partial(
      layers.ParallelMixer, attention=self.attention(), recurrent=self.mamba()
    )
    return block

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    given = self.ATTENTION_IN_MULTIPLIER  # Of queries, keys and values.
    attention.scale = self.KEY_MULTIPLIER * given**2 * self.head_dim() ** -0.5
    attention.output.scale = self.ATTENTION_OUT_MULTIPLIER * given
    return attention

  def mamba(self) -> fdl.Partial[layers.Mamba2]:
    mamba = super().mamba()
    for name, factor in zip(_SECTIONS, self.SSM_MULTIPLIERS, strict=True):
      getattr(mamba, name).scale = self.SSM_IN_MULTIPLIER * factor
    mamba.output.scale = self.SSM_OUT_MULTIPLIER
    return mamba

  def mamba_norm(self) -> fdl.Partial[layers.GroupedRmsNorm] | None:
    return super().mamba_norm() if self.USE_MAMBA_NORM else None

  def mlp(self) -> fdl.Partial[layers.Mlp]:
    mlp = super().mlp()
    mlp.gate.scale, mlp.down.scale = self.MLP_MULTIPLIERS
    return mlp

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("attention_bias", "stack.{}.attention.*"),
      model_type="falcon_h1",
      architecture="FalconH1ForCausalLM",
      knobs={
        **{key: (key.upper(), 1.0) for key in _MULTIPLIERS},
        "embedding_multiplier": ("EMBEDDING_SCALE", 1.0),
        "ssm_multipliers": ("SSM_MULTIPLIERS", (1.0,) * 5),
        "mlp_multipliers": ("MLP_MULTIPLIERS", (1.0, 1.0)),
        "mamba_rms_norm": ("USE_MAMBA_NORM", False),
        **MAMBA_KEYS,
        "mamba_d_head": ("MAMBA_DIMS_PER_HEAD", 8),
      },
      defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "mamba_norm_before_gate": True},
      derived={"mamba_d_ssm": lambda config: config["mamba_n_heads"] * config["mamba_d_head"]},
      fixed={
        "mamba_norm_before_gate": False,
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "time_step_limit": NO_STEP_LIMITS,
      },
      # In the published configurations, but unused.
      neutral={"attn_layer_indices", "mamba_chunk_size", "mamba_expand", "mamba_use_mlp"}
      | {"mlp_expansion_factor", "num_logits_to_keep"},
      rope=HfRope(types=("default",)),
      rules=_rules(family.rules),
    )


def _rules(of_llama: Rules) -> Rules:
  """Returns the rule of each weight."""
  at, mixer = "model.layers.{}", "stack.{}.attention"
  rules: Rules = {}
  for name, rule in of_llama.items():
    theirs = rule.name.replace(".mlp.", ".feed_forward.")
    ours = name.replace(f"{mixer}.", f"{mixer}.attention.")
    rules[ours] = dataclasses.replace(rule, name=theirs)
  return {
    **rules,
    "stack.{}.mlp_norm.scale": Same(f"{at}.pre_ff_layernorm.weight"),
    "norm.scale": Same("model.final_layernorm.weight"),
    **mamba_rules(f"{mixer}.recurrent", f"{at}.mamba"),
  }


@register
class FalconH1_0_5B(datasets.Synthetic, FalconH1):
  """Falcon-H1 0.5B. 521,411,104 parameters."""

  VOCAB_SIZE = 32_784
  MAX_SEQ_LEN = 16_384
  NUM_LAYERS = 36
  MODEL_DIMS = 1024
  HIDDEN_DIMS = 2048
  NUM_HEADS = 8
  NUM_KV_HEADS = 2
  DIMS_PER_HEAD = 64
  MAMBA_NUM_HEADS = 24
  EMBEDDING_SCALE = 5.656854249492381
  LM_HEAD_MULTIPLIER = 0.0390625
  KEY_MULTIPLIER = 0.39062499999999994
  ATTENTION_OUT_MULTIPLIER = 0.9375
  SSM_IN_MULTIPLIER = 1.25
  SSM_OUT_MULTIPLIER = 0.23570226039551587
  SSM_MULTIPLIERS = (0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738)
  MLP_MULTIPLIERS = (0.8838834764831844, 0.5859375)


@register
class FalconH1_7B(datasets.Synthetic, FalconH1):
  """Falcon-H1 7B. 7,585,648,736 parameters."""

  VOCAB_SIZE = 130_048
  MAX_SEQ_LEN = 262_144
  NUM_LAYERS = 44
  MODEL_DIMS = 3072
  HIDDEN_DIMS = 12_288
  NUM_HEADS = 12
  NUM_KV_HEADS = 2
  DIMS_PER_HEAD = 128
  MAMBA_NUM_HEADS = 24
  MAMBA_DIMS_PER_HEAD = 128
  MAMBA_STATE_DIMS = 256
  USE_MAMBA_NORM = True
  EMBEDDING_SCALE = 5.656854249492381
  LM_HEAD_MULTIPLIER = 0.013020833333333334
  KEY_MULTIPLIER = 0.03069039848899946
  ATTENTION_OUT_MULTIPLIER = 0.10416666666666667
  SSM_IN_MULTIPLIER = 0.4166666666666667
  SSM_OUT_MULTIPLIER = 0.11785113019775793
  SSM_MULTIPLIERS = (0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738)
  MLP_MULTIPLIERS = (0.2946278254943948, 0.032552083333333336)
