# SPDX-License-Identifier: Apache-2.0
"""OLMo 2 (Walsh et al., 2025) and OLMo 3 (Ai2, 2025): models with public data and training code.

LLaMA with norms of the outputs of attention and MLP instead of their inputs, and with RMSNorm of
the queries of all heads together, and of the keys. OLMo 3 has a window in three of four layers, and
YaRN in the others.
"""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.checkpoints.hf_rules import Same
from paxlike.config import ranges
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class Olmo2(Llama):
  """The OLMo 2 family."""

  VOCAB_SIZE = 100_352
  MAX_SEQ_LEN = 4096
  NORM_EPSILON = 1e-6
  ROPE_THETA = 500_000.0

  def block(self) -> fdl.Partial[layers.Block]:
    block = super().block()
    block.norm, block.post_norm = None, self.norm()
    return block

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    attention.joint_qk_norm = fdl.Partial(layers.GroupedRmsNorm, epsilon=self.NORM_EPSILON)
    return attention

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    at = "model.layers.{}"
    family = super().hugging_face()
    return family.variant(
      lacking=("stack.{}.attention_norm.scale", "stack.{}.mlp_norm.scale"),
      model_type="olmo2",
      architecture="Olmo2ForCausalLM",
      defaults={"rms_norm_eps": 1e-5},
      rules={
        "stack.{}.attention.query_norm.scale": Same(f"{at}.self_attn.q_norm.weight", ndim=1),
        "stack.{}.attention.key_norm.scale": Same(f"{at}.self_attn.k_norm.weight", ndim=1),
        "stack.{}.attention_post_norm.scale": Same(f"{at}.post_attention_layernorm.weight"),
        "stack.{}.mlp_post_norm.scale": Same(f"{at}.post_feedforward_layernorm.weight"),
      },
    )


@register
class Olmo2_1B(datasets.Synthetic, Olmo2):
  """OLMo 2 1B. 1,484,916,736 parameters."""

  NUM_LAYERS = 16
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 8192
  NUM_HEADS = 16


@register
class Olmo2_7B(datasets.Synthetic, Olmo2):
  """OLMo 2 7B. 7,298,617,344 parameters."""

  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 11_008
  NUM_HEADS = 32


@register
class Olmo2_13B(datasets.Synthetic, Olmo2):
  """OLMo 2 13B. 13,716,198,400 parameters."""

  NUM_LAYERS = 40
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 13_824
  NUM_HEADS = 40


@register
class Olmo2_32B(datasets.Synthetic, Olmo2):
  """OLMo 2 32B. 32,234,279,936 parameters."""

  NUM_LAYERS = 64
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27_648
  NUM_HEADS = 40
  NUM_KV_HEADS = 8


class Olmo3(Olmo2):
  """The OLMo 3 family: three local layers per layer of full attention."""

  VOCAB_SIZE = 100_278
  MAX_SEQ_LEN = 65_536
  WINDOW: ranges.Positive = 4096  #: Attention window of local layers, including the current token.
  ROPE_SCALING = "yarn"
  ROPE_FACTOR = 8.0
  ROPE_ORIGINAL_LENGTH = 8192

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    return [*(self.local_block() for _ in range(3)), self.block()]

  def local_block(self) -> fdl.Partial[layers.Block]:
    """Returns a layer with sliding-window attention, whose rotary positions are not scaled."""
    block = self.block()
    block.attention.window = self.WINDOW
    block.attention.rope = fdl.Partial(layers.Rope, theta=self.ROPE_THETA)
    return block

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      model_type="olmo3",
      architecture="Olmo3ForCausalLM",
      knobs={"sliding_window": ("WINDOW", 4096)},
      layers=LayerPattern((*["sliding_attention"] * 3, "full_attention")),
      rope=HfRope(theta=500_000.0, local_unscaled=True),
    )


@register
class Olmo3_7B(datasets.Synthetic, Olmo3):
  """OLMo 3 7B. 7,298,011,136 parameters."""

  NUM_LAYERS = 32
  MODEL_DIMS = 4096
  HIDDEN_DIMS = 11_008
  NUM_HEADS = 32


@register
class Olmo3_32B(datasets.Synthetic, Olmo3):
  """OLMo 3 32B. 32,233,522,176 parameters."""

  NUM_LAYERS = 64
  MODEL_DIMS = 5120
  HIDDEN_DIMS = 27_648
  NUM_HEADS = 40
  NUM_KV_HEADS = 8
