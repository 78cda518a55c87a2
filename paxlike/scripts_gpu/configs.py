# SPDX-License-Identifier: Apache-2.0
"""The GPU recipes of Pax, under the names that its users know.

`Synthetic126M` and the others run on whatever is here; the classes named for a number of GPUs have
the published meshes, ICI within a node of eight and DCN across nodes.
"""

from paxlike.experiments.gpt import Synthetic5B, Synthetic126M, Synthetic175B
from paxlike.registry import register

__all__ = ["Synthetic126M", "Synthetic126M64Gpus", "Synthetic175B", "Synthetic175B256Gpus"]
__all__ += ["Synthetic5B", "Synthetic5B256Gpus"]


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
