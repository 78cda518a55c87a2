# SPDX-License-Identifier: Apache-2.0
"""Kimi K2 (Kimi Team, 2025, arXiv:2507.20534): DeepSeek-V3 with more experts and fewer heads.

Its `config.json` has a `model_type` of its own, kimi_k2, which only marks it for inference engines:
the class is DeepseekV3ForCausalLM, and transformers has no such type. So it is a size of the family
DeepSeek: an import reads kimi_k2 as deepseek_v3, and an export writes deepseek_v3, which
transformers loads.

It was trained by Muon with QK-clip: `OPTIMIZER=muon QK_CLIP=100`. Its tokenizer, `tiktoken.model`,
is not read.
"""

from paxlike.experiments import datasets
from paxlike.experiments.deepseek import DeepSeek
from paxlike.registry import register


@register
class KimiK2(datasets.Synthetic, DeepSeek):
  """Kimi K2 of July 2025. 1,026,408,209,408 parameters, router biases not counted."""

  VOCAB_SIZE = 163_840
  MAX_SEQ_LEN = 131_072
  NUM_LAYERS = 61
  NUM_DENSE_LAYERS = 1
  MODEL_DIMS = 7168
  HIDDEN_DIMS = 18432
  NUM_HEADS = 64
  EXPERT_DIMS = 2048
  NUM_EXPERTS = 384
  NUM_EXPERT_GROUPS = 1
  NUM_EXPERT_GROUPS_PER_TOKEN = 1
  ROUTED_SCALE = 2.827
  ROPE_THETA = 50_000.0
  ROPE_FACTOR = 32.0
  ROPE_FAST = 1.0


@register
class KimiK2_0905(KimiK2):
  """Kimi K2 of September 2025, with a context of 262,144 tokens."""

  MAX_SEQ_LEN = 262_144
  ROPE_FACTOR = 64.0
