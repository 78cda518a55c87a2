# SPDX-License-Identifier: Apache-2.0
"""A way to spread the training of a model over devices, and the knobs that choose it."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from paxlike.layers.pipeline import Pipeline
from paxlike.layers.remat import Remat
from paxlike.mesh import AXES, RULES
from paxlike.networks import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
  """A mesh, a batch, and in which parts and order they are computed.

  Attributes:
    ici: Size of each of `mesh.AXES` within a slice or node.
    dcn: Its size across them.
    batch: Sequences of an optimizer step, on all devices.
    remat: What the backward pass finds saved.
    accumulation: Parts of the batch that are computed one after another.
    pipeline: How the layers are spread over stages, if there are several.
    reduced_once: Whether gradients are summed over devices once a step, not once in each part.
      Paxlike's are not, programs of others are.
    residual_over_tensor: Whether what goes from layer to layer is cut over tensor.
  """

  ici: tuple[int, ...]
  dcn: tuple[int, ...] = (1,) * len(AXES)
  batch: int
  remat: Remat = Remat.SAVE_NOTHING
  accumulation: int = 1
  pipeline: Pipeline | None = None
  reduced_once: bool = False
  residual_over_tensor: bool = False

  @property
  def sizes(self) -> dict[str, int]:
    """The size of every axis of the mesh."""
    return {axis: i * o for axis, i, o in zip(AXES, self.ici, self.dcn, strict=True)}

  @property
  def num_devices(self) -> int:
    """All devices."""
    return math.prod(self.ici) * math.prod(self.dcn)

  def group(self, *axes: str) -> Group:
    """Returns the devices that axes join."""
    inner, outer = (
      math.prod(size for axis, size in zip(AXES, sizes, strict=True) if axis in axes)
      for sizes in (self.ici, self.dcn)
    )
    return Group(inner, outer, math.prod(self.ici))

  @property
  def microbatches(self) -> int:
    """Parts of the batch that go through the layers one after another."""
    return self.accumulation * (1 if self.pipeline is None else self.pipeline.microbatches)

  @property
  def rows(self) -> float:
    """Sequences of a microbatch on each device."""
    shards = math.prod(self.sizes[axis] for axis in RULES["batch"])
    return self.batch / shards / self.microbatches

  @property
  def residual_cut(self) -> int:
    """Devices of a stage that share what goes from layer to layer of their tokens."""
    return self.sizes["tensor"] if self.residual_over_tensor else 1

  @property
  def knobs(self) -> dict[str, Any]:
    """The knobs of an experiment that choose this, and nothing else in its place."""
    return {
      "ICI_MESH_SHAPE": _spelt(self.ici),
      "DCN_MESH_SHAPE": _spelt(self.dcn),
      "PERCORE_BATCH_SIZE": self.batch / self.num_devices,
      "CHECKPOINT_POLICY": self.remat.name,
      "GRADIENT_ACCUMULATION_STEPS": self.accumulation,
      "NUM_STAGES": None,
      **({} if self.pipeline is None else _of_stages(self.pipeline)),
    }


def _of_stages(pipeline: Pipeline) -> dict[str, Any]:
  return {
    "NUM_VIRTUAL_STAGES": pipeline.chunks if pipeline.chunks > 1 else None,
    "CIRCULAR_REPEAT": None,
    "NUM_MICROBATCHES": pipeline.microbatches,
    "PIPELINE_SCHEDULE": pipeline.schedule,
    "PIPELINE_RECOMPUTE": pipeline.recompute,
  }


def _spelt(sizes: tuple[int, ...]) -> tuple[int, ...] | dict[str, int]:
  """Returns the sizes as users write them: three or four numbers, or names where these are less."""
  named: Mapping[str, int] = dict(zip(AXES, sizes, strict=True))
  if any(named[axis] > 1 for axis in ("expert", "context")):
    return {axis: size for axis, size in named.items() if size > 1}
  short = tuple(named[axis] for axis in ("data", "fsdp", "tensor"))
  return short if named["pipeline"] == 1 else (named["pipeline"], *short)
