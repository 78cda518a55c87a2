# SPDX-License-Identifier: Apache-2.0
"""SmolLM3 (Bakouch et al., 2025): LLaMA without rotary positions in every fourth layer (NoPE)."""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.checkpoints.hf_rope import HfRope
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class SmolLM3(Llama):
  """The SmolLM3 family."""

  VOCAB_SIZE = 128_256
  MAX_SEQ_LEN = 65_536
  NORM_EPSILON = 1e-6
  ROPE_THETA = 5_000_000.0
  USE_TIED_EMBEDDING = True

  def pattern(self) -> list[fdl.Partial[layers.Block]]:
    return [*(self.block() for _ in range(3)), self.nope_block()]

  def nope_block(self) -> fdl.Partial[layers.Block]:
    """Returns a layer without rotary positions."""
    block = self.block()
    block.attention.rope = None
    return block

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      model_type="smollm3",
      architecture="SmolLM3ForCausalLM",
      defaults={"num_key_value_heads": 4, "tie_word_embeddings": True},
      neutral={"sliding_window", "max_window_layers"},  # There is no window.
      fixed={"use_sliding_window": False, "no_rope_layer_interval": 4},
      # 1: with rotary positions.
      layers=LayerPattern(("full_attention",), others={"no_rope_layers": (1, 1, 1, 0)}),
      rope=HfRope(theta=2_000_000.0),
    )


@register
class SmolLM3_3B(datasets.Synthetic, SmolLM3):
  """SmolLM3 3B. 3,075,098,624 parameters."""

  NUM_LAYERS = 36
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 11_008
  NUM_HEADS = 16
  NUM_KV_HEADS = 4
