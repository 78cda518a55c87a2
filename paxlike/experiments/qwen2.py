# SPDX-License-Identifier: Apache-2.0
"""Qwen2 and Qwen2.5 (Yang et al., 2024): LLaMA with biases of queries, keys and values."""

import fiddle as fdl

from paxlike import layers
from paxlike.checkpoints import hf_family as hugging_face
from paxlike.checkpoints.hf_layers import LayerPattern
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.experiments.reinforcement import PromptFiles
from paxlike.registry import register


class Qwen2(Llama):
  """The Qwen2 family, to which Qwen2.5 belongs, too."""

  VOCAB_SIZE = 151_936
  MAX_SEQ_LEN = 32_768
  NORM_EPSILON = 1e-6
  ROPE_THETA = 1_000_000.0

  def linear(self, role: str) -> fdl.Partial[layers.Linear]:
    linear = super().linear(role)
    if role in ("query", "key", "value"):
      linear.use_bias = True
    return linear

  @classmethod
  def hugging_face(cls) -> hugging_face.Family:
    family = super().hugging_face()
    return family.variant(
      lacking=("attention_bias", "mlp_bias", "stack.{}.attention.output.b"),
      model_type="qwen2",
      architecture="Qwen2ForCausalLM",
      defaults={"num_key_value_heads": 32},
      neutral={"sliding_window", "max_window_layers"},  # There is no window.
      fixed={"use_sliding_window": False},
      layers=LayerPattern(("full_attention",)),
    )


class SmallQwen25(Qwen2):
  """The size of Qwen2.5 0.5B."""

  NUM_LAYERS = 24
  MODEL_DIMS = 896
  HIDDEN_DIMS = 4864
  NUM_HEADS = 14
  NUM_KV_HEADS = 2
  USE_TIED_EMBEDDING = True


@register
class Qwen25_0_5B(datasets.Synthetic, SmallQwen25):
  """Qwen2.5 0.5B. 494,032,768 parameters."""


@register
class Qwen25_1_5B(datasets.Synthetic, Qwen2):
  """Qwen2.5 1.5B. 1,543,714,304 parameters."""

  NUM_LAYERS = 28
  MODEL_DIMS = 1536
  HIDDEN_DIMS = 8960
  NUM_HEADS = 12
  NUM_KV_HEADS = 2
  USE_TIED_EMBEDDING = True


@register
class Qwen25_3B(datasets.Synthetic, Qwen2):
  """Qwen2.5 3B. 3,085,938,688 parameters."""

  NUM_LAYERS = 36
  MODEL_DIMS = 2048
  HIDDEN_DIMS = 11_008
  NUM_HEADS = 16
  NUM_KV_HEADS = 2
  USE_TIED_EMBEDDING = True


@register
class Qwen25_7B(datasets.Synthetic, Qwen2):
  """Qwen2.5 7B. 7,615,616,512 parameters."""

  VOCAB_SIZE = 152_064
  NUM_LAYERS = 28
  MODEL_DIMS = 3584
  HIDDEN_DIMS = 18_944
  NUM_HEADS = 28
  NUM_KV_HEADS = 4


@register
class Qwen25_72B(datasets.Synthetic, Qwen2):
  """Qwen2.5 72B. 72,706,203,648 parameters."""

  VOCAB_SIZE = 152_064
  NUM_LAYERS = 80
  MODEL_DIMS = 8192
  HIDDEN_DIMS = 29_568
  NUM_HEADS = 64
  NUM_KV_HEADS = 8


@register
class Gsm8kQwen25_0_5B(PromptFiles, SmallQwen25):
  """GRPO of Qwen2.5 0.5B on GSM8K, whose records have `question` and `answer`.

  Its flags are: --fdl.CHECKPOINT_RESTORE_PATH=DIR --fdl.TOKENIZER=huggingface
  and --fdl.VOCAB_PATH=DIR/tokenizer.json --fdl.CHAT_TEMPLATE=tokenizer
  and --fdl.DATA_PATH=train.jsonl --fdl.EVAL_DATA_PATH=test.jsonl.
  """

  PROMPT_FIELD = "question"
  SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
  REWARD = "math_answer"
  PROMPTS_PER_STEP = 128
  GROUP_SIZE = 8
  MAX_PROMPT_TOKENS = 512
  MAX_NEW_TOKENS = 1024
  MAX_SEQ_LEN = 4096
  PERCORE_BATCH_SIZE = 2
  DECODE_SLOTS = 512
  LEARNING_RATE = 1e-6
  LR_COS_WARMUP = 10
  MAX_STEPS = 400
  SUMMARY_INTERVAL_STEPS = 1
  EVAL_INTERVAL_STEPS = 50
  CHECKPOINT_EVERY_N_STEPS = 50
