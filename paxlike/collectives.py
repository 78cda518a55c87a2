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
    if len(group) == 1:
      continue
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

  A TPU's compiler cuts one into parts, to do something else meanwhile: fusions of one channel.
  """
  seen: set[tuple[str, ...]] = set()

  def walk(computation: str, count: int, fused: bool) -> Iterator[tuple[str, Instruction, int]]:
    for one in found.get(computation, ()):
      kind = next((kind for kind in COLLECTIVES if one.operation.startswith(kind)), None)
      if kind is None:
        for called in one.called:
          yield from walk(called, count * one.times(found), fused or one.operation == "fusion")
      elif not one.operation.endswith("-done") and not (fused and _key(kind, one) in seen):
        seen.add(_key(kind, one))
        # A TPU's fusion of this name leaves each device its part.
        is_scattered = computation.startswith("all-reduce-scatter")
        yield "reduce-scatter" if is_scattered else kind, one, count

  return walk("", 1, False)


def _key(kind: str, one: Instruction) -> tuple[str, ...]:
  channel = re.search(r"channel_id=(\d+)", one.attributes)
  return kind, channel[1] if channel else one.name, str([shape.dims for shape in one.outputs])


def _result(one: Instruction) -> int:
  """Returns the bytes of a collective's result on one device."""
  shapes = one.outputs
  if one.operation == "collective-permute-start":
    shapes = shapes[1:2]  # Between the operand and two counters.
  elif one.operation.endswith("-start") and one.operation != "all-reduce-start":
    shapes = shapes[len(shapes) // 2 :]  # After the operands.
  return sum(shape.nbytes for shape in shapes)


_MESH = re.compile(
  r"replica_groups=@?mesh\[([^\]]*)\]"
  r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]+\})\}")


def _group(attributes: str, num_devices: int) -> np.ndarray:
  """Returns the positions in the mesh of devices that exchange something.

  Raises:
    ValueError: The groups are written in a way that is not known.
  """
  if told := _MESH.search(attributes):  # mesh['axis_0'=16,'axis_1'=16] {'axis_1'}
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", told[1]))
    taking = re.findall(r"'([^']*)'", told[4])
    index = tuple(slice(None) if name in taking else 0 for name in sizes)
    ids = _iota(told[2] or str(num_devices), told[3])
    return ids.reshape([int(size) for size in sizes.values()])[index].ravel()
  if told := _IOTA.search(attributes):  # [32,8]<=[8,32]T(1,0)
    return _iota(told[2], told[3]).reshape(_numbers(told[1]))[0]
  if told := _LISTS.search(attributes):  # {{0,1},{2,3}}, or pairs, whose ends may be the same
    groups = [np.array(_numbers(text)) for text in re.findall(r"\{([\d,]+)\}", told[1])]
    several = (group for group in groups if len(set(group.tolist())) > 1)
    return next(several, groups[0][:1])
  if re.search(r"replica_groups=(?!\{\})", attributes):
    raise ValueError(f"groups of devices that are not understood: {attributes}")
  return np.arange(num_devices)


def _iota(dims: str, order: str | None) -> np.ndarray:
  ids = np.arange(np.prod(_numbers(dims))).reshape(_numbers(dims))
  return (ids.transpose(_numbers(order)) if order else ids).ravel()


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]


def _axes(group: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes along which the devices of a group differ."""
  places = np.unravel_index(group, tuple(mesh.shape.values()))
  return tuple(
    axis for axis, place in zip(mesh.shape, places, strict=True) if len(set(place.tolist())) > 1
  )


def total(found: list[Collective]) -> float:
  """Returns the bytes that each device sends in one run."""
  return math.fsum(one.nbytes for one in found)
