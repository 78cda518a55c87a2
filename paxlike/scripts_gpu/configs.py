# SPDX-License-Identifier: Apache-2.0
"""GPU recipes of Pax, under the names that Pax gives them, and some of MaxText.

Recipes without a number of GPUs in their names, such as `Synthetic126M`, run on any devices. The
others have a mesh for that number, ICI within nodes of eight GPUs and DCN across nodes;
benchmarks/recipes.py compiles them for H100.
"""

from paxlike.experiments.glam import SyntheticGLaM64B64E
from paxlike.experiments.gpt import Synthetic5B, Synthetic126M, Synthetic175B
from paxlike.experiments.llama import SyntheticLLaMA7B, SyntheticLLaMA70B
from paxlike.registry import register

__all__ = [
  "Synthetic5B",
  "Synthetic5B256Gpus",
  "Synthetic126M",
  "Synthetic126M64Gpus",
  "Synthetic175B",
  "Synthetic175B64Gpus",
  "Synthetic175B256Gpus",
  "SyntheticGLaM64B64E512Gpus",
  "SyntheticLLaMA7B16Gpus",
  "SyntheticLLaMA7BLora16Gpus",
  "SyntheticLLaMA70B64Gpus",
]


@register
class Synthetic126M64Gpus(Synthetic126M):
  """GPT 126M on 64 GPUs, data parallel: 256 sequences per step."""

  ICI_MESH_SHAPE = (8, 1, 1)
  DCN_MESH_SHAPE = (8, 1, 1)


@register
class Synthetic5B256Gpus(Synthetic5B):
  """GPT 5B on 256 GPUs, FSDP: 2,048 sequences per step."""

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 32, 1)


@register
class Synthetic175B256Gpus(Synthetic175B):
  """GPT 175B on 256 GPUs, FSDP: 1,536 sequences per step."""

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 32, 1)


@register
class Synthetic175B64Gpus(Synthetic175B):
  """GPT 175B on 64 GPUs, 8 pipeline stages x 8 tensor: 128 sequences per step in microbatches of 2.

  174,615,846,912 parameters, with the vocabulary of the published run.
  Published for JaxPP's fork of MaxText on 64 H100, same mesh and schedule: 10.98 s per step.
  """

  VOCAB_SIZE = 51200
  ICI_MESH_SHAPE = {"tensor": 8}
  DCN_MESH_SHAPE = {"pipeline": 8}
  PIPELINE_SCHEDULE = "interleaved_1f1b"
  NUM_VIRTUAL_STAGES = 3
  NUM_MICROBATCHES = 64
  PERCORE_BATCH_SIZE = 2
  CHECKPOINT_POLICY = "SAVE_EVERYTHING"


@register
class SyntheticGLaM64B64E512Gpus(SyntheticGLaM64B64E):
  """GLaM 64B/64E on 512 GPUs: 2,048 sequences per step; eight experts per group of eight nodes.

  Pax instead shards experts over 64 nodes like other weights, and all-gathers those of a layer.
  """

  ICI_MESH_SHAPE = {"tensor": 8}
  DCN_MESH_SHAPE = {"fsdp": 8, "expert": 8}
  SHARD_SEQUENCE_OVER_TENSOR = True
  GRADIENT_ACCUMULATION_STEPS = 4


@register
class SyntheticLLaMA70B64Gpus(SyntheticLLaMA70B):
  """LLaMA 2 70B on 64 GPUs, FSDP: 128 sequences of 4,096 tokens per step.

  Published for MaxText on 64 H100: 6.999 s per step in BF16, 4.324 s in FP8.
  """

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 8, 1)
  PERCORE_BATCH_SIZE = 2
  CHECKPOINT_POLICY = "SAVE_NOTHING"


@register
class SyntheticLLaMA7B16Gpus(SyntheticLLaMA7B):
  """LLaMA 2 7B, all weights trained, on 16 GPUs, FSDP: 32 sequences of 4,096 tokens per step.

  Published for Pax on 16 H100: 43.24 sequences/s in BF16, 53.69 with Transformer Engine.
  """

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 2, 1)
  PERCORE_BATCH_SIZE = 2
  CHECKPOINT_POLICY = "SAVE_NOTHING"


@register
class SyntheticLLaMA7BLora16Gpus(SyntheticLLaMA7B16Gpus):
  """LLaMA 2 7B, LoRA of rank 32, on 16 GPUs.

  Published for Pax on 16 H100: 43.8 sequences/s in BF16, 63.2 with Transformer Engine.
  """

  USE_LORA = True
  LORA_RANK = 32
