# SPDX-License-Identifier: Apache-2.0
"""MaxText's default model, scaled by MaxText's rule from 16 billion to a trillion parameters.

The recipes for TPU slices follow MaxText's configs/v5e and configs/v5p; published speeds are from
its README. DCN_MESH_SHAPE=[N,1,1] adds data parallelism over N slices.
`paxlike --fdl_config=Scaled16BV5e256 --mode=compile --topology=v5e-256` prints the memory per chip;
benchmarks/recipes.py does so for all recipes.
"""

from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama
from paxlike.registry import register


class Scaled(Llama):
  """The family of MaxText's default model: 16 layers of width 2048 at scale 1."""

  VOCAB_SIZE = 32000
  MAX_SEQ_LEN = 2048
  DIMS_PER_HEAD = 128


def sizes(scale: int) -> tuple[int, int, int, int]:
  """Returns (NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS) at a scale, a power of 2.

  Of every three doublings of the scale, the first doubles NUM_HEADS and HIDDEN_DIMS, the second
  MODEL_DIMS, the third NUM_LAYERS.
  """
  times, rest = divmod(scale.bit_length() - 1, 3)
  layers, model, ffn = 2**times, 2 ** (times + (rest > 1)), 2 ** (times + (rest > 0))
  return 16 * layers, 2048 * model, 7168 * ffn, 16 * ffn


@register
class Scaled16B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 16. 15,831,666,688 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(16)


@register
class Scaled32B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 32. 31,663,333,376 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(32)


@register
class Scaled64B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 64. 62,802,370,560 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(64)


@register
class Scaled128B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 128. 125,079,396,352 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(128)


@register
class Scaled256B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 256. 250,158,792,704 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(256)


@register
class Scaled512B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 512. 499,268,993,024 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(512)


@register
class Scaled1024B(datasets.Synthetic, Scaled):
  """MaxText's default model at scale 1024. 997,485,199,360 parameters."""

  NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS = sizes(1024)


class V5e256(Scaled):
  """One slice of 256 chips: FSDP over all of them, full rematerialization."""

  ICI_MESH_SHAPE = (1, 256, 1)
  CHECKPOINT_POLICY = "SAVE_NOTHING"


@register
class Scaled16BV5e256(V5e256, Scaled16B):
  """Scale 16 on v5e-256. MaxText publishes 120 TFLOP/s per chip, 61.1 % of its peak."""

  PERCORE_BATCH_SIZE = 6


@register
class Scaled32BV5e256(V5e256, Scaled32B):
  """Scale 32 on v5e-256. MaxText publishes 132 TFLOP/s per chip, 66.9 % of its peak."""

  PERCORE_BATCH_SIZE = 4


@register
class Scaled64BV5e256(V5e256, Scaled64B):
  """Scale 64 on v5e-256. MaxText publishes 118 TFLOP/s per chip, 59.9 % of its peak."""

  PERCORE_BATCH_SIZE = 2


@register
class Scaled128BV5e256(V5e256, Scaled128B):
  """Scale 128 on v5e-256, four microbatches per step: the best plan of --mode=plan.

  MaxText publishes 110 TFLOP/s per chip, 56.1 % of its peak, for FSDP 16 x tensor 16.
  """

  ICI_MESH_SHAPE = (1, 64, 4)
  PERCORE_BATCH_SIZE = 1
  GRADIENT_ACCUMULATION_STEPS = 4


class V5p(Scaled):
  """Slices v5p-N of N/2 chips, which have enough memory to save the outputs of linear maps."""

  ICI_MESH_SHAPE = (1, -1, 4)
  SHARD_SEQUENCE_OVER_TENSOR = True
  CHECKPOINT_POLICY = "SAVE_DOT_WITH_NO_BATCH_DIM"


@register
class Scaled32BV5p128(V5p, Scaled32B):
  """Scale 32 on v5p-128. MaxText publishes 328 TFLOP/s per chip, 71.5 % of its peak."""

  PERCORE_BATCH_SIZE = 6


@register
class Scaled64BV5p128(V5p, Scaled64B):
  """Scale 64 on v5p-128. MaxText publishes 323 TFLOP/s per chip, 70.3 % of its peak."""

  PERCORE_BATCH_SIZE = 3


@register
class Scaled128BV5p256(V5p, Scaled128B):
  """Scale 128 on v5p-256. MaxText publishes 315 TFLOP/s per chip, 68.7 % of its peak."""

  ICI_MESH_SHAPE = (1, -1, 8)
  PERCORE_BATCH_SIZE = 1


@register
class Scaled256BV5p1024(V5p, Scaled256B):
  """Scale 256 on v5p-1024. MaxText publishes 316 TFLOP/s per chip, 68.8 % of its peak."""

  ICI_MESH_SHAPE = (1, -1, 8)
  PERCORE_BATCH_SIZE = 1


@register
class Scaled512BV5p1024(V5p, Scaled512B):
  """Scale 512 on v5p-1024. MaxText publishes 294 TFLOP/s per chip, 64.0 % of its peak."""

  ICI_MESH_SHAPE = (1, -1, 8)
  CHECKPOINT_POLICY = "SAVE_NOTHING"
  PERCORE_BATCH_SIZE = 2


@register
class Scaled1024BV5p4096(V5p, Scaled1024B):
  """Scale 1024 on v5p-4096. MaxText publishes 297 TFLOP/s per chip, 64.8 % of its peak."""

  ICI_MESH_SHAPE = (1, -1, 16)
  CHECKPOINT_POLICY = "SAVE_NOTHING"
  PERCORE_BATCH_SIZE = 2
