# SPDX-License-Identifier: Apache-2.0
"""A parallel configuration of training, and the knobs that select it."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from paxlike.devices.interconnect import Group
from paxlike.devices.mesh import AXES, RULES
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.layers.remat import Remat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """A mesh, a batch size, gradient accumulation, remat policy and pipeline.

  Attributes:
    ici: Size of each of `mesh.AXES` within a slice or node.
    dcn: Size of each across slices or nodes.
    batch: The global batch of an optimizer step, in sequences.
    remat: The remat policy.
    accumulation: Gradient-accumulation microbatches.
    pipeline: The pipeline, if there are several stages.
    reduced_once: Whether gradients are reduced over devices once per step instead of once per
      microbatch; paxlike reduces per microbatch, some other frameworks once.
    residual_over_tensor: Whether the residual stream is sharded over `tensor`.
  """

  ici: tuple[int, ...]
  dcn: tuple[int, ...] = (1,) * len(AXES)
  batch: int
  remat: Remat = Remat.SAVE_NOTHING
  accumulation: int = 1
  pipeline: Pipeline | None = None
  reduced_once: bool = False
  residual_over_tensor: bool = False

  @functools.cached_property
  def sizes(self) -> dict[str, int]:
    """Axis -> size of the mesh."""
    return {axis: i * o for axis, i, o in zip(AXES, self.ici, self.dcn, strict=True)}

  @property
  def num_devices(self) -> int:
    """The number of devices."""
    return math.prod(self.ici) * math.prod(self.dcn)

  def group(self, *axes: str) -> Group:
    """Returns the group of devices along these axes."""
    return _group(self.ici, self.dcn, axes)

  @property
  def microbatches(self) -> int:
    """The number of microbatches: of gradient accumulation, times those of the pipeline."""
    return self.accumulation * (1 if self.pipeline is None else self.pipeline.microbatches)

  @property
  def sequences(self) -> float:
    """Sequences of a microbatch per device."""
    shards = math.prod(self.sizes[axis] for axis in RULES["batch"])
    return self.batch / shards / self.microbatches

  def tokens(self, seq_len: int) -> float:
    """Returns the tokens of a microbatch per device, whose sequences `context` shards."""
    return self.sequences * seq_len / self.sizes["context"]

  @property
  def residual_shards(self) -> int:
    """The number of shards of a device's tokens of the residual stream over `tensor`."""
    return self.sizes["tensor"] if self.residual_over_tensor else 1

  @property
  def knobs(self) -> dict[str, Any]:
    """The knobs of an experiment that select this configuration."""
    return {
      "ICI_MESH_SHAPE": _spelt(self.ici),
      "DCN_MESH_SHAPE": _spelt(self.dcn),
      "PERCORE_BATCH_SIZE": self.batch / self.num_devices,
      "CHECKPOINT_POLICY": self.remat.name,
      "GRADIENT_ACCUMULATION_STEPS": self.accumulation,
      "NUM_STAGES": None,
      **({} if self.pipeline is None else _of_stages(self.pipeline)),
    }


@functools.cache
def _group(ici: tuple[int, ...], dcn: tuple[int, ...], axes: tuple[str, ...]) -> Group:
  inner, outer = (
    math.prod(size for axis, size in zip(AXES, sizes, strict=True) if axis in axes)
    for sizes in (ici, dcn)
  )
  return Group(inner, outer, math.prod(ici))


def _of_stages(pipeline: Pipeline) -> dict[str, Any]:
  return {
    "NUM_VIRTUAL_STAGES": pipeline.chunks if pipeline.chunks > 1 else None,
    "CIRCULAR_REPEAT": None,
    "NUM_MICROBATCHES": pipeline.microbatches,
    "PIPELINE_SCHEDULE": pipeline.schedule,
    "PIPELINE_RECOMPUTE": pipeline.recompute,
  }


def _spelt(sizes: tuple[int, ...]) -> tuple[int, ...] | dict[str, int]:
  """Returns the mesh shape in a knob's form: three or four numbers, or a mapping where needed."""
  named: Mapping[str, int] = dict(zip(AXES, sizes, strict=True))
  if any(named[axis] > 1 for axis in ("expert", "context")):
    return {axis: size for axis, size in named.items() if size > 1}
  short = tuple(named[axis] for axis in ("data", "fsdp", "tensor"))
  return short if named["pipeline"] == 1 else (named["pipeline"], *short)
