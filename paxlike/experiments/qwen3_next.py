# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next (Qwen team, 2025): three layers of Gated DeltaNet per layer of gated attention.

Norms have weights around 0, a quarter of a head's dims is rotated, and every layer has experts.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Matrix, Rules, Same, Taps, either, grouped, stacked
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.moe import Moe
from paxlike.experiments.qwen import Qwen3, Qwen3Moe
from paxlike.registry import register

_AT = "model.layers.{}.linear_attn"
_OURS = "stack.{}.attention"


class QwenHybrid(Qwen3):
  """Qwen3 with three linear layers per layer of attention, and a gate of attention."""

  MAX_SEQ_LEN = 262_144
  DIMS_PER_HEAD = 256
  ROPE_THETA = 10_000_000.0
  ROPE_SHARE: ranges.Share = 0.25  #: Share of a head's dims that is rotated, the first ones.
  LINEAR_NUM_KEY_HEADS: ranges.Size = 16  #: Heads of queries and keys of linear layers.
  LINEAR_NUM_VALUE_HEADS: ranges.Size = 32  #: Heads of values, and states, of linear layers.
  LINEAR_DIMS_PER_KEY_HEAD: ranges.Size = 128  #: Width of a key of linear layers.
  LINEAR_DIMS_PER_VALUE_HEAD: ranges.Size = 128  #: Width of a value of linear layers.
  LINEAR_CONV_TAPS: ranges.Size = 4  #: Tokens that convolutions of linear layers see.

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    return [*(self.linear_block() for _ in range(3)), self.block()]

  def linear_block(self) -> fdl.Partial[layers.Block]:
    """Returns a layer with a recurrent state."""
    block = self.block()
    block.attention = self.linear_attention()
    return block

  def linear_attention(self) -> fdl.Partial[layers.GatedDeltaNet]:
    """Returns the mixer of a linear layer."""
    roles = ("query", "key", "value", "output_gate", "beta", "decay", "output")
    return fdl.Partial(
      layers.GatedDeltaNet,
      num_heads=self.LINEAR_NUM_VALUE_HEADS,
      num_key_heads=self.LINEAR_NUM_KEY_HEADS,
      key_dim=self.LINEAR_DIMS_PER_KEY_HEAD,
      value_dim=self.LINEAR_DIMS_PER_VALUE_HEAD,
      **{role: self.linear(role) for role in roles},
      conv=fdl.Partial(layers.ShortConv, taps=self.LINEAR_CONV_TAPS),
      norm=fdl.Partial(layers.RmsNorm, epsilon=self.NORM_EPSILON),
    )

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.output_gate = self.linear("output_gate")
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope = super().rope()
    rope.share = self.ROPE_SHARE
    return rope

  def norm(self) -> fdl.Partial:
    norm = super().norm()
    norm.offset = 1.0
    return norm


class GatedSharedExpert(Moe):
  """A mixin for families with experts: a gated expert that every token passes through."""

  SHARED_EXPERT_DIMS: ranges.Size = 512  #: Width of the expert that processes every token.

  def mlp(self) -> fdl.Partial:
    moe = super().mlp()
    moe.shared = self.dense_mlp()
    moe.shared.hidden_dim = self.SHARED_EXPERT_DIMS
    moe.shared_gate = self.linear("shared_gate")
    return moe


def hybrid_family(
  family: hugging_face.Family, *, num_kv_heads: int, projections: Rules
) -> hugging_face.Family:
  """Returns the Hugging Face family of a `QwenHybrid`.

  Args:
    family: That of the same model without linear layers.
    num_kv_heads: The default of `num_key_value_heads`.
    projections: The rules of the linear maps of linear layers, but the output.
  """
  family = family.variant(lacking=("attention_bias", "stack.*.b"))
  attention = "model.layers.{}.self_attn"
  gated = (f"{_OURS}.query.w", f"{_OURS}.output_gate.w")
  convs = {f"{_OURS}.{role}_conv.w": Taps("") for role in ("query", "key", "value")}
  linear: Rules = {
    **projections,
    **stacked(f"{_AT}.conv1d.weight", convs),
    f"{_OURS}.norm.scale": Same(f"{_AT}.norm.weight"),
    f"{_OURS}.log_rate": Same(f"{_AT}.A_log"),
    f"{_OURS}.decay_bias": Same(f"{_AT}.dt_bias"),
    f"{_OURS}.output.w": Matrix(f"{_AT}.out_proj.weight", inputs=2),
  }
  full = {
    **family.rules,
    **grouped(f"{attention}.q_proj.weight", *gated, groups=f"{_OURS}.query.w"),
  }
  return family.variant(
    knobs={
      "linear_num_key_heads": ("LINEAR_NUM_KEY_HEADS", 16),
      "linear_num_value_heads": ("LINEAR_NUM_VALUE_HEADS", 32),
      "linear_key_head_dim": ("LINEAR_DIMS_PER_KEY_HEAD", 128),
      "linear_value_head_dim": ("LINEAR_DIMS_PER_VALUE_HEAD", 128),
      "linear_conv_kernel_dim": ("LINEAR_CONV_TAPS", 4),
    },
    defaults={
      "num_key_value_heads": num_kv_heads,
      "head_dim": 256,
    },
    fixed={"full_attention_interval": 4},
    layers=LayerPattern((*["linear_attention"] * 3, "full_attention")),
    rope=HfRope(share=0.25, neutral=frozenset({"mrope_section", "mrope_interleaved"})),
    rules=either(f"{_OURS}.log_rate", linear, full),
    ignored={r"mtp\..*"},
  )


class Qwen3Next(GatedSharedExpert, QwenHybrid):
  """The Qwen3-Next family."""

  NUM_KV_HEADS = 2
  NUM_EXPERTS = 512
  NUM_EXPERTS_PER_TOKEN = 10
  BALANCE_LOSS_WEIGHT = 0.001

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    roles = ("query", "key", "value", "output_gate")
    inputs = [f"{_OURS}.{role}.w" for role in roles]
    gates = f"{_OURS}.beta.w", f"{_OURS}.decay.w"
    family = hybrid_family(
      Qwen3Moe.hugging_face(),
      num_kv_heads=2,
      projections={
        **grouped(f"{_AT}.in_proj_qkvz.weight", *inputs, groups=inputs[0]),
        **grouped(f"{_AT}.in_proj_ba.weight", *gates, groups=inputs[0]),
      },
    )
    return with_shared_expert(family).variant(
      model_type="qwen3_next",
      architecture="Qwen3NextForCausalLM",
      defaults={
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
      },
    )


def with_shared_expert(family: hugging_face.Family) -> hugging_face.Family:
  """Returns a family with the expert of `GatedSharedExpert`."""
  ours, theirs = "stack.{}.mlp.shared", "model.layers.{}.mlp.shared_expert"
  roles = ("gate", "up", "down")
  return family.variant(
    knobs={"shared_expert_intermediate_size": ("SHARED_EXPERT_DIMS", 512)},
    rules={
      **{f"{ours}.{role}.w": Matrix(f"{theirs}.{role}_proj.weight") for role in roles},
      f"{ours}_gate.w": Matrix(f"{theirs}_gate.weight"),
    },
  )


@register
class Qwen3Next80B_A3B(datasets.Synthetic, Qwen3Next):
  """Qwen3-Next 80B-A3B. 79,674,391,296 parameters."""

  NUM_LAYERS = 48
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 5120
  EXPERT_DIMS = 512
  NUM_HEADS = 16
