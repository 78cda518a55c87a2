# SPDX-License-Identifier: Apache-2.0
"""GLM-4.5 (GLM-4.5 Team, 2025, arXiv:2508.06471), GLM-4.5-Air and GLM-4.6: the experts of
DeepSeek-V3, grouped-query attention with biases, and rotary positions of half of a head's dims.

Dim i of a head is paired with dim i + 32 of the first 64, unlike in earlier models of GLM, which
pair neighbors. `MTP_NUM_LAYERS=1` adds its layer for multi-token prediction.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.deepseek import DeepSeekMoe, with_experts
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class GlmMoe(DeepSeekMoe, Llama):
  """The GLM-4.5 family."""

  VOCAB_SIZE = 151_552
  MAX_SEQ_LEN = 131_072
  DIMS_PER_HEAD = 128
  NUM_HEADS = 96
  NUM_KV_HEADS = 8
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  ROPE_THETA = 1_000_000.0
  ROPE_SHARE: ranges.Share = 0.5  #: Share of a head's dims that rotary positions rotate.
  USE_ATTENTION_BIAS = True

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    if self.QK_NORM:
      attention.qk_norm = self.norm()
    return attention

  def rope(self) -> fdl.Partial[layers.Rope]:
    rope = super().rope()
    rope.share = self.ROPE_SHARE
    return rope

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    if role == "output":
      linear.use_bias = False
    return linear

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    return with_experts(super().hugging_face()).variant(
      lacking=("mlp_bias", "stack.{}.attention.output.b"),
      model_type="glm4_moe",
      architecture="Glm4MoeForCausalLM",
      knobs={"use_qk_norm": ("QK_NORM", False)},
      defaults={
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
      },
      rope=HfRope(share=0.5),
    )


@register
class Glm45(datasets.Synthetic, GlmMoe):
  """GLM-4.5 355B. 352,797,814,784 parameters, router biases not counted."""

  NUM_LAYERS = 92
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 12288
  EXPERT_DIMS = 1536
  NUM_EXPERTS = 160
  QK_NORM = True


@register
class Glm46(Glm45):
  """GLM-4.6 355B: GLM-4.5 with a longer context."""

  MAX_SEQ_LEN = 202_752


@register
class Glm45Air(datasets.Synthetic, GlmMoe):
  """GLM-4.5-Air 106B. 106,852,245,504 parameters, router biases not counted."""

  NUM_LAYERS = 46
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 10944
  EXPERT_DIMS = 1408
  NUM_EXPERTS = 128
  NUM_DENSE_LAYERS = 1
  ROUTED_SCALE = 1.0
