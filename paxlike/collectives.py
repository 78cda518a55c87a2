# SPDX-License-Identifier: Apache-2.0
"""What the devices of a compiled program send each other: kinds, axes of the mesh, and overlap."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from paxlike import program_text
from paxlike.program_text import COLLECTIVES, Computations, computations


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


class Instruction(NamedTuple):
  """One collective of the program's text.

  Attributes:
    kind, axes, count, nbytes: As of `Collective`.
    in_loop: Whether a loop runs it.
    is_async: Whether the device computes something else between its start and its end.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  nbytes: float
  in_loop: bool
  is_async: bool


class Overlap(NamedTuple):
  """How collectives of one kind are scheduled, in loops or outside of them.

  Attributes:
    kind: As XLA calls it.
    in_loop: Whether a loop runs them.
    asynchronous, synchronous: Instructions of the program's text, not times that they run.
    asynchronous_nbytes, synchronous_nbytes: That each device sends by them in one run.
  """

  kind: str
  in_loop: bool
  asynchronous: int
  synchronous: int
  asynchronous_nbytes: float
  synchronous_nbytes: float


def instructions(program: str, mesh: Mesh) -> list[Instruction]:
  """Returns the collectives of a program in the order of its text.

  Args:
    program: Its text, `compiled.as_text()`.
    mesh: What it was compiled for.
  """
  rows = []
  for kind, one, count, in_loop, is_async in _distinct(computations(program)):
    group = _group(one.attributes, mesh.size)
    if len(group) == 1:
      continue
    share = 1.0 if kind == "collective-permute" else 1 - 1 / len(group)
    sent = share * _result(one)
    if one.operation.startswith("reduce-scatter"):
      sent *= len(group)  # Its result is one part.
    elif kind == "all-reduce":
      sent *= 2
    rows.append(Instruction(kind, _axes(group, mesh), count, count * sent, in_loop, is_async))
  return rows


def collectives(program: str, mesh: Mesh) -> list[Collective]:
  """Returns what is exchanged in one run of a program, the most bytes first."""
  sums: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
  for one in instructions(program, mesh):
    count, nbytes = sums.get((one.kind, one.axes), (0, 0.0))
    sums[one.kind, one.axes] = count + one.count, nbytes + one.nbytes
  rows = [Collective(*key, *values) for key, values in sums.items()]
  return sorted(rows, key=lambda row: -row.nbytes)


def overlap(program: str, mesh: Mesh) -> list[Overlap]:
  """Returns how the collectives of a program are scheduled: in loops first, then by kind."""
  sums: dict[tuple[str, bool], Overlap] = {}
  for one in instructions(program, mesh):
    key = one.kind, one.in_loop
    _, _, begun, waited, hidden, exposed = sums.get(key, Overlap(*key, 0, 0, 0.0, 0.0))
    if one.is_async:
      sums[key] = Overlap(*key, begun + 1, waited, hidden + one.nbytes, exposed)
    else:
      sums[key] = Overlap(*key, begun, waited + 1, hidden, exposed + one.nbytes)
  return sorted(sums.values(), key=lambda row: (not row.in_loop, row.kind))


_Found = tuple[str, program_text.Instruction, int, bool, bool]


def _distinct(found: Computations) -> Iterator[_Found]:
  """Yields the kind of each collective, itself, how often it runs, `in_loop` and `is_async`.

  A TPU's compiler splits one into fusions of one channel, to compute something in between: the
  first holds a custom call that says so.
  """
  seen: set[tuple[str, ...]] = set()

  def walk(name: str, count: int, in_loop: bool, fused: bool, is_async: bool) -> Iterator[_Found]:
    computation = found.get(name, [])
    is_async |= fused and any(one.target == "AsyncCollectiveStart" for one in computation)
    for index, one in enumerate(computation):
      kind = next((kind for kind in COLLECTIVES if one.operation.startswith(kind)), None)
      overlaps = is_async or _overlaps(computation, index)
      if kind is None:
        inner = in_loop or one.operation == "while"
        begun = overlaps if one.operation == "async-start" else is_async
        for called in one.called:
          times = count * one.times(found)
          yield from walk(called, times, inner, fused or one.operation == "fusion", begun)
      elif not one.operation.endswith("-done") and not (fused and _key(kind, one) in seen):
        seen.add(_key(kind, one))
        # A TPU's fusion of this name leaves each device its part.
        is_scattered = name.startswith("all-reduce-scatter")
        yield "reduce-scatter" if is_scattered else kind, one, count, in_loop, overlaps

  return walk("", 1, False, False, False)


# What computes nothing.
_FREE = ("get-tuple-element", "tuple", "bitcast", "constant", "parameter", "after-all", "copy")
_FREE += ("partition-id", "replica-id", "opt-barrier", "add-dependency")


def _overlaps(computation: list[program_text.Instruction], index: int) -> bool:
  """Returns whether an instruction begins what ends only after the device has computed more."""
  start = computation[index]
  if not start.operation.endswith("-start") or '"is_sync":true' in start.attributes:
    return False
  operations = (one.operation for one in _between(computation, index))
  return any(
    one not in _FREE and not one.endswith(("-start", "-done")) and not one.startswith(COLLECTIVES)
    for one in operations
  )


def _between(
  computation: list[program_text.Instruction], index: int
) -> Iterator[program_text.Instruction]:
  """Yields the instructions between the start of something and its end.

  The text of a compiled program is in the order in which it runs. What a loop's body begins and
  gives as a result, the next run of the body ends.
  """
  name = computation[index].name
  for one in computation[index + 1 :]:
    if name in one.operands and one.operation != "tuple":
      return
    if name in one.operands:
      name = _carried(computation, one.operands.index(name))
      break
    yield one
  else:
    return
  for one in computation if name else []:
    if name in one.operands:
      return
    yield one


def _carried(computation: list[program_text.Instruction], index: int) -> str:
  """Returns what a loop's body calls that part of its parameter; empty if it does not take it."""
  parameters = [one.name for one in computation if one.operation == "parameter"]
  for one in computation:
    is_part = one.operation == "get-tuple-element" and one.operands == parameters
    if is_part and re.search(rf"\bindex={index}\b", one.attributes):
      return one.name
  return ""


def _key(kind: str, one: program_text.Instruction) -> tuple[str, ...]:
  channel = re.search(r"channel_id=(\d+)", one.attributes)
  return kind, channel[1] if channel else one.name, str([shape.dims for shape in one.outputs])


def _result(one: program_text.Instruction) -> int:
  """Returns the bytes of a collective's result on one device.

  What begins one may also hold its operands, before the results, and counters after them.
  """
  shapes, num_operands = one.outputs, len(one.operands)
  if one.operation.endswith("-start") and len(shapes) >= 2 * num_operands:
    shapes = shapes[num_operands : 2 * num_operands]
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
