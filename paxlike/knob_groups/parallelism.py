# SPDX-License-Identifier: Apache-2.0
"""The knobs of the mesh and of pipelines, and the methods that return both."""

from typing import Literal

import fiddle as fdl

from paxlike import layers
from paxlike.config import building, ranges
from paxlike.config.knobs import Knobs
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError


class ParallelismKnobs(Knobs):
  """Parallelism: the device mesh, pipelines and sequence parallelism."""

  #: Mesh within a slice or node: [data, fsdp, tensor] or {axis: size}; -1: all remaining devices.
  ICI_MESH_SHAPE: tuple[ranges.AxisSize, ...] | dict[str, ranges.AxisSize] = (-1, 1, 1)
  #: Mesh across slices or nodes, in the same form.
  DCN_MESH_SHAPE: tuple[ranges.AxisSize, ...] | dict[str, ranges.AxisSize] = (1, 1, 1)
  #: Pipeline schedule, if the mesh axis pipeline is larger than 1.
  PIPELINE_SCHEDULE: Literal["gpipe", "circular", "1f1b", "interleaved_1f1b"] = "1f1b"
  NUM_STAGES: ranges.Positive | None = None  #: Pipeline stages. None: size of the axis pipeline.
  #: Chunks of layers per stage, for circular and interleaved_1f1b. None: 1.
  NUM_VIRTUAL_STAGES: ranges.Positive | None = None
  CIRCULAR_REPEAT: ranges.Positive | None = None  #: Pax's name for NUM_VIRTUAL_STAGES.
  #: Pipeline microbatches per gradient-accumulation step. None: NUM_STAGES.
  NUM_MICROBATCHES: ranges.Positive | None = None
  #: Save only each chunk's input for the backward pass; False: what CHECKPOINT_POLICY saves.
  PIPELINE_RECOMPUTE: bool = True
  #: Sequence parallelism: shard norms and residuals along the sequence over the mesh axis tensor.
  SHARD_SEQUENCE_OVER_TENSOR: bool = False

  def mesh(self) -> fdl.Config[MeshSpec]:
    """Returns the shape of the device mesh."""
    return fdl.Config(MeshSpec, ici=self.ICI_MESH_SHAPE, dcn=self.DCN_MESH_SHAPE)

  def pipeline(self) -> fdl.Config[layers.Pipeline] | None:
    """Returns the pipeline of the layers; None if there is one stage.

    Raises:
      UserError: Knobs contradict each other.
    """
    mesh = building.build(self.mesh(), source=f"what {type(self).__name__}.mesh() returns")
    size = mesh.axis("pipeline")
    stages = size if self.NUM_STAGES is None else self.NUM_STAGES
    if stages is None or size not in (None, stages):
      raise UserError(
        f"NUM_STAGES={self.NUM_STAGES}, but the axis pipeline of ICI_MESH_SHAPE x DCN_MESH_SHAPE is"
        f" {size or -1}: give both the same size."
      )
    if stages == 1:
      return None
    given = {self.NUM_VIRTUAL_STAGES, self.CIRCULAR_REPEAT} - {None}
    if len(given) > 1:
      raise UserError("NUM_VIRTUAL_STAGES and CIRCULAR_REPEAT differ: set one of them.")
    count = self.NUM_MICROBATCHES
    return fdl.Config(
      layers.Pipeline,
      schedule=self.PIPELINE_SCHEDULE,
      stages=stages,
      chunks=given.pop() if given else 1,
      microbatches=stages if count is None else count,
      recompute=self.PIPELINE_RECOMPUTE,
    )
