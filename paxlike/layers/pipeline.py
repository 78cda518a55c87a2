# SPDX-License-Identifier: Apache-2.0
"""A pipeline of stages, and the way through it without a loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers import ring
from paxlike.layers.layout import Layout
from paxlike.layers.schedules import Half, Schedule


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
  """How the layers of a stack are spread over stages.

  Attributes:
    schedule: Of `schedules.SCHEDULES`.
    stages: S, the size of the mesh axis `pipeline`.
    chunks: Groups of layers that a stage holds; chunk c of stage s is place c * S + s.
    microbatches: Parts of a batch that go through the pipeline one after another.
    recompute: Whether a stage stores but the input of a chunk, and computes it anew to go back;
      else it stores what the remat of its layers saves.
  """

  schedule: str
  stages: ranges.Positive
  chunks: ranges.Positive = 1
  microbatches: ranges.Positive
  recompute: bool = True

  def __post_init__(self):
    counts = {"NUM_MICROBATCHES": self.microbatches, "NUM_VIRTUAL_STAGES": self.chunks}
    for knob, count in counts.items():
      if count < 1:
        raise UserError(f"{knob}={count} must be at least 1.")
    several = self.schedule in ("circular", "interleaved_1f1b")
    if several != (self.chunks > 1):
      raise UserError(
        f"PIPELINE_SCHEDULE={self.schedule} has {'more than one chunk' if several else 'one chunk'}"
        f" of layers a stage, but NUM_VIRTUAL_STAGES={self.chunks}."
      )
    if self.chunks > 1 and self.microbatches % self.stages:
      raise UserError(
        f"NUM_MICROBATCHES={self.microbatches} is not a multiple of NUM_STAGES={self.stages}, which"
        f" PIPELINE_SCHEDULE={self.schedule} needs."
      )

  def spread(self, layout: Layout) -> Layout:
    """Returns the layout of a stack whose repeats are spread over the stages.

    Raises:
      UserError: They do not divide.
    """
    assert layout.scanned
    if layout.repeats % self.num_places:
      raise UserError(
        f"a pipeline of NUM_STAGES={self.stages} x NUM_VIRTUAL_STAGES={self.chunks} cannot share"
        f" {layout.repeats} repeats of {layout.pattern} layers: change NUM_LAYERS or the stages."
      )
    if self.chunks == 1:
      return layout
    return dataclasses.replace(layout, stages=self.stages, chunks=self.chunks)

  @property
  def num_places(self) -> int:
    """Groups of layers that follow each other."""
    return self.stages * self.chunks

  @property
  def plan(self) -> Schedule:
    """What is done when."""
    return Schedule(
      name=self.schedule,
      stages=self.stages,
      chunks=self.chunks,
      microbatches=self.microbatches,
    )


def forward(
  pipeline: Pipeline,
  chunk: Callable[[Any, jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
  stacked: Any,
  x: jax.Array,
  microbatches: Any,
) -> tuple[jax.Array, Any]:
  """Returns (what microbatches come to, the sums of reports), without a loss; differentiable.

  Args:
    pipeline: Its schedule is as if there were no way back.
    chunk: (weights of a chunk, x, microbatch, place) -> (x, reports).
    stacked: The weights.
    x: [M, b, T, D].
    microbatches: A pytree of [M, ...].
  """
  S, v = pipeline.stages, pipeline.chunks
  name = "gpipe" if v == 1 else "circular"
  plan = dataclasses.replace(pipeline.plan, name=name, microbatches=len(x))
  row = next(iter(plan.phases(keeps_first=True))).forward

  def on_stage(stacked: Any, x: jax.Array, microbatches: Any) -> tuple[jax.Array, Any]:
    index = jax.lax.axis_index(ring.AXIS)

    def tick(carry: Any, half: Half) -> Any:
      up, out, total = carry
      m, c = half.microbatch[index], half.chunk[index]
      at = jnp.maximum(m, 0)
      place = c * S + index
      weights = jax.tree.map(lambda w: ring.take(ring.by_chunk(w, v), c), stacked)
      given = jnp.where(place == 0, x[at], up)
      y, reports = chunk(weights, given, ring.take(microbatches, at), place)
      is_final = (m >= 0) & (place == S * v - 1)
      out = ring.put(out, y, jnp.where(is_final, at, -1))
      up = ring.upwards(y, S)
      return (up, out, jax.tree.map(jnp.add, total, ring.only_if(m >= 0, reports))), None

    def first() -> tuple[jax.Array, Any]:
      weights = jax.tree.map(lambda w: ring.by_chunk(w, v)[0], stacked)
      return chunk(weights, x[0], ring.take(microbatches, 0), index)

    _, reports = jax.eval_shape(first)
    start = (jnp.zeros_like(x[0]), jnp.zeros_like(x), ring.zeros(reports))
    (_, out, total), _ = jax.lax.scan(tick, start, row)
    return out[None], jax.tree.map(lambda leaf: leaf[None], total)

  cut, whole = PartitionSpec(ring.AXIS), PartitionSpec()
  out, total = ring.on_stages(on_stage, in_specs=(cut, whole, whole), out_specs=(cut, cut))(
    stacked, x, microbatches
  )
  return out[-1], jax.tree.map(lambda leaf: leaf.sum(0), total)


def split_rows(tree: Any, count: int) -> Any:
  """Returns [B, ...] as [count, B / count, ...].

  Every count-th row goes into the same part, so that devices find their shares in their own rows.
  """
  return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), tree)
