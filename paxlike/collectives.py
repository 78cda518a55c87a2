# SPDX-License-Identifier: Apache-2.0
"""What the devices of a compiled program send each other, by kind and by axis of the mesh."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from paxlike.program_text import COLLECTIVES, Computations, Instruction, computations


class Collective(NamedTuple):
  """One kind of exchange along the same axes.

  Attributes:
    kind: As XLA calls it.
    axes: Of the mesh, whose devices take part.
    count: Times in one run of the program.
    nbytes: That each device sends in one run, at the least: (n - 1) / n of an array for n devices
      that gather or scatter it, twice that for an all-reduce.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  nbytes: float


def collectives(program: str, mesh: Mesh) -> list[Collective]:
  """Returns what is exchanged in one run of a program, the most bytes first.

  Args:
    program: Its text, `compiled.as_text()`.
    mesh: What it was compiled for.
  """
  found = computations(program)
  sums: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
  for kind, one, count in _distinct(found):
    group = _group(one.attributes, mesh.size)
    share = 1.0 if kind == "collective-permute" else 1 - 1 / len(group)
    sent = share * _result(one)
    if one.operation.startswith("reduce-scatter"):
      sent *= len(group)  # Its result is one part.
    elif kind == "all-reduce":
      sent *= 2
    key = kind, _axes(group, mesh)
    before = sums.get(key, (0, 0.0))
    sums[key] = before[0] + count, before[1] + count * sent
  rows = [Collective(*key, *values) for key, values in sums.items()]
  return sorted(rows, key=lambda row: -row.nbytes)


def _distinct(found: Computations) -> Iterator[tuple[str, Instruction, int]]:
  """Yields the kind of each collective, itself, and how often it runs.

  The parts that a TPU's compiler cuts one into, to do something else meanwhile, share a channel.
  """
  seen: set[str] = set()

  def walk(computation: str, count: int) -> Iterator[tuple[str, Instruction, int]]:
    for one in found.get(computation, ()):
      kind = next((kind for kind in COLLECTIVES if one.operation.startswith(kind)), None)
      if kind is None:
        for called in one.called:
          yield from walk(called, count * one.times(found))
      elif not one.operation.endswith("-done"):
        channel = re.search(r"channel_id=(\d+)", one.attributes)
        if channel is None or channel[1] not in seen:
          # A TPU's fusion of this name leaves each device its part.
          yield (
            "reduce-scatter" if computation.startswith("all-reduce-scatter") else kind,
            one,
            count,
          )
        if channel is not None:
          seen.add(channel[1])

  return walk("", 1)


def _result(one: Instruction) -> int:
  """Returns the bytes of a collective's result on one device."""
  shapes = one.outputs
  if one.operation in ("all-gather-start", "reduce-scatter-start"):
    shapes = shapes[len(shapes) // 2 :]  # After the operands.
  elif one.operation == "collective-permute-start":
    shapes = shapes[1:2]  # Between the operand and two counters.
  return sum(shape.nbytes for shape in shapes)


def _group(attributes: str, num_devices: int) -> np.ndarray:
  """Returns the positions in the mesh of devices that exchange something."""
  every = np.arange(num_devices)
  # mesh['axis_0'=16,'axis_1'=16] {'axis_1'}
  if told := re.search(r"replica_groups=@?mesh\[([^\]]*)\][^{,]*\{([^}]*)\}", attributes):
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", told[1]))
    taking = re.findall(r"'([^']*)'", told[2])
    index = tuple(slice(None) if name in taking else 0 for name in sizes)
    return every.reshape([int(size) for size in sizes.values()])[index].ravel()
  # [32,8]<=[8,32]T(1,0)
  if told := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes):
    groups, dims, order = ([int(x) for x in (text or "").split(",") if x] for text in told.groups())
    ids = every.reshape(dims)
    return (ids.transpose(order) if order else ids).reshape(groups)[0]
  # {{0,1},{2,3}}, or pairs of a source and a target, who may be the same
  told = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]+\})\}", attributes)
  if told is None:
    return every
  groups = [np.array(group.split(","), int) for group in re.findall(r"\{([\d,]+)\}", told[1])]
  return next((group for group in groups if len(set(group)) == len(group)), groups[0])


def _axes(group: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes along which the devices of a group differ."""
  places = np.unravel_index(group, tuple(mesh.shape.values()))
  return tuple(
    axis for axis, place in zip(mesh.shape, places, strict=True) if len(set(place.tolist())) > 1
  )


def total(found: list[Collective]) -> float:
  """Returns the bytes that each device sends in one run."""
  return math.fsum(one.nbytes for one in found)
