# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline, and its forward pass without a loss."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import ArgumentError
from paxlike.layers import aux_losses, pytree_indexing
from paxlike.layers.pipeline import stage_shift
from paxlike.layers.pipeline.schedules import Half, Schedule


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
  """How the layers of a stack are split over pipeline stages, and their schedule.

  Attributes:
    schedule: One of `schedules.SCHEDULES`.
    stages: S, the size of the mesh axis `pipeline`.
    chunks: Groups of layers per stage; chunk c of stage s is virtual stage ("place") c * S + s.
    microbatches: M, the number of microbatches that a batch is split into.
    recompute: Whether a stage stores only the input of a chunk and recomputes the chunk in the
      backward pass; otherwise it stores what the layers' remat policy saves. The layers before
      the stacked ones are always computed again.
  """

  schedule: str
  stages: ranges.Positive
  chunks: ranges.Positive = 1
  microbatches: ranges.Positive
  recompute: bool = True

  def __post_init__(self):
    for name in ("microbatches", "chunks"):
      if (count := getattr(self, name)) < 1:
        raise ArgumentError(f"{name}={count} must be at least 1.")
    several = self.schedule in ("circular", "interleaved_1f1b")
    if several != (self.chunks > 1):
      raise ArgumentError(
        f"schedule={self.schedule} has {'more than one chunk' if several else 'one chunk'} of"
        f" layers per stage, but chunks={self.chunks}."
      )
    if self.chunks > 1 and self.microbatches % self.stages:
      raise ArgumentError(
        f"microbatches={self.microbatches} is not a multiple of stages={self.stages}, which"
        f" schedule={self.schedule} needs."
      )

  @property
  def num_places(self) -> int:
    """The number of virtual stages, S * chunks."""
    return self.stages * self.chunks

  @property
  def plan(self) -> Schedule:
    """The schedule of a training step."""
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
  """Returns (outputs [M, b, T, D], the sum of Aux) of the forward pass; differentiable.

  Args:
    pipeline: The pipeline; forward chunks run in the order of gpipe or circular.
    chunk: (weights of a chunk, x, microbatch, place) -> (x, Aux).
    stacked: The weights, [layers, ...].
    x: [M, b, T, D].
    microbatches: A pytree of [M, ...].
  """
  S, v = pipeline.stages, pipeline.chunks
  name = "gpipe" if v == 1 else "circular"
  plan = dataclasses.replace(pipeline.plan, name=name, microbatches=len(x))
  ticks = next(iter(plan.phases())).forward

  def on_stage(stacked: Any, x: jax.Array, microbatches: Any) -> tuple[jax.Array, Any]:
    index = jax.lax.axis_index(stage_shift.AXIS)

    def tick(carry: Any, half: Half) -> Any:
      up, out, total = carry
      m, c = half.microbatch[index], half.chunk[index]
      at = jnp.maximum(m, 0)
      place = c * S + index
      weights = jax.tree.map(
        lambda w: pytree_indexing.take(pytree_indexing.by_chunk(w, v), c), stacked
      )
      given = jnp.where(place == 0, x[at], up)
      y, aux = chunk(weights, given, pytree_indexing.take(microbatches, at), place)
      is_final = (m >= 0) & (place == S * v - 1)
      out = pytree_indexing.put(out, y, jnp.where(is_final, at, -1))
      up = stage_shift.upwards(y, S)
      return (up, out, aux_losses.add(total, pytree_indexing.where(m >= 0, aux))), None

    def first() -> tuple[jax.Array, Any]:
      weights = jax.tree.map(lambda w: pytree_indexing.by_chunk(w, v)[0], stacked)
      return chunk(weights, x[0], pytree_indexing.take(microbatches, 0), index)

    _, aux = jax.eval_shape(first)
    start = (jnp.zeros_like(x[0]), jnp.zeros_like(x), pytree_indexing.zeros(aux))
    (_, out, total), _ = jax.lax.scan(tick, start, ticks)
    return out[None], jax.tree.map(lambda leaf: leaf[None], total)

  sharded, replicated = PartitionSpec(stage_shift.AXIS), PartitionSpec()
  out, total = stage_shift.on_stages(
    on_stage, in_specs=(sharded, replicated, replicated), out_specs=(sharded, sharded)
  )(stacked, x, microbatches)
  return out[-1], aux_losses.total(total)


def split_microbatches(tree: Any, count: int) -> Any:
  """Returns a pytree of [B, ...] as `count` microbatches, [count, B / count, ...].

  Microbatch i has the sequences i, i + count, ..., so that each device already holds its shard of
  every microbatch.
  """
  return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), tree)
