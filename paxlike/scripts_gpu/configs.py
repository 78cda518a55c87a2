# SPDX-License-Identifier: Apache-2.0
"""The GPU recipes of Pax, under the names that its users know, and some of MaxText.

`Synthetic126M` and the others run on whatever is here; the classes named for a number of GPUs have
meshes for that number, ICI within a node of eight and DCN across nodes. They are compiled for H100
by benchmarks/recipes.py.
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
  """GPT 126M on 64 GPUs, data parallel: 256 sequences a step."""

  ICI_MESH_SHAPE = (8, 1, 1)
  DCN_MESH_SHAPE = (8, 1, 1)


@register
class Synthetic5B256Gpus(Synthetic5B):
  """GPT 5B on 256 GPUs, FSDP: 2,048 sequences a step."""

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 32, 1)


@register
class Synthetic175B256Gpus(Synthetic175B):
  """GPT 175B on 256 GPUs, FSDP: 1,536 sequences a step."""

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 32, 1)


@register
class Synthetic175B64Gpus(Synthetic175B):
  """GPT 175B on 64 GPUs, through 8 stages of 8: 128 sequences a step, two at a time.

  174,615,846,912 parameters, as its vocabulary is that of the published run.
  Published for JaxPP's fork of MaxText on 64 H100, with the same mesh and schedule: 10.98 s a step.
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
  """GLaM 64B/64E on 512 GPUs: 2,048 sequences a step; eight experts to a group of nodes.

  Pax cuts experts over 64 nodes as it does all weights, and so gathers all of a layer's.
  """

  ICI_MESH_SHAPE = {"tensor": 8}
  DCN_MESH_SHAPE = {"fsdp": 8, "expert": 8}
  SHARD_SEQUENCE_OVER_TENSOR = True
  GRADIENT_ACCUMULATION_STEPS = 4


@register
class SyntheticLLaMA70B64Gpus(SyntheticLLaMA70B):
  """LLaMA 2 70B on 64 GPUs, FSDP: 128 sequences of 4,096 tokens a step.

  Published for MaxText on 64 H100: 6.999 s a step in BF16, 4.324 s in FP8.
  """

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 8, 1)
  PERCORE_BATCH_SIZE = 2
  CHECKPOINT_POLICY = "SAVE_NOTHING"


@register
class SyntheticLLaMA7B16Gpus(SyntheticLLaMA7B):
  """LLaMA 2 7B, all weights trained, on 16 GPUs, FSDP: 32 sequences of 4,096 tokens a step.

  Published for Pax on 16 H100: 43.24 sequences/s in BF16, 53.69 with Transformer Engine.
  """

  ICI_MESH_SHAPE = (1, 8, 1)
  DCN_MESH_SHAPE = (1, 2, 1)
  PERCORE_BATCH_SIZE = 2
  CHECKPOINT_POLICY = "SAVE_NOTHING"


@register
class SyntheticLLaMA7BLora16Gpus(SyntheticLLaMA7B16Gpus):
  """LLaMA 2 7B, adapters of rank 32 trained, on 16 GPUs.

  Published for Pax on 16 H100: 43.8 sequences/s in BF16, 63.2 with Transformer Engine.
  """

  USE_LORA = True
  LORA_RANK = 32
