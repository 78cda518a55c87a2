# SPDX-License-Identifier: Apache-2.0
"""The collectives of a compiled program: kinds, mesh axes, bytes, and overlap with compute."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from paxlike.compilation import hlo_text
from paxlike.compilation.hlo_text import COLLECTIVES, Computations, computations


class Collective(NamedTuple):
  """All collectives of one kind over the same axes.

  Attributes:
    kind: XLA's name.
    axes: The mesh axes of its groups.
    count: How often they run in one run of the program.
    nbytes: The least bytes that each device sends in one run: (n - 1) / n of the array for an
      all-gather or reduce-scatter over n devices, twice that for an all-reduce.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  nbytes: float


class CollectiveInstruction(NamedTuple):
  """One collective instruction.

  Attributes:
    kind, axes, count, nbytes: See `Collective`.
    in_loop: Whether it is inside a loop.
    is_async: Whether the device computes between its start and its done.
    name: The name of the instruction.
    source: The `op_name` that JAX gave the operation.
  """

  kind: str
  axes: tuple[str, ...]
  count: int
  nbytes: float
  in_loop: bool
  is_async: bool
  name: str
  source: str = ""


class Overlap(NamedTuple):
  """The scheduling of collectives of one kind, inside or outside of loops.

  Attributes:
    kind: XLA's name.
    in_loop: Whether they are inside a loop.
    asynchronous, synchronous: Counts of instructions, not of executions.
    asynchronous_nbytes, synchronous_nbytes: Bytes that each device sends in one run.
  """

  kind: str
  in_loop: bool
  asynchronous: int
  synchronous: int
  asynchronous_nbytes: float
  synchronous_nbytes: float


def instructions(program: str, mesh: Mesh) -> list[CollectiveInstruction]:
  """Returns the collectives of a program in the order of its text.

  Args:
    program: The HLO text, `compiled.as_text()`.
    mesh: The mesh it was compiled for.
  """
  found = []
  for kind, one, count, in_loop, is_async in _distinct(computations(program)):
    group = np.array(groups(one.attributes, mesh.size)[0])
    if len(group) == 1:
      continue
    share = 1.0 if kind == "collective-permute" else 1 - 1 / len(group)
    sent = share * result_bytes(one)
    if one.operation.startswith("reduce-scatter"):
      sent *= len(group)  # Its result is one shard.
    elif kind == "all-reduce":
      sent *= 2
    found.append(
      CollectiveInstruction(
        kind, _axes(group, mesh), count, count * sent, in_loop, is_async, one.name, one.op_name
      )
    )
  return found


def collectives(program: str, mesh: Mesh) -> list[Collective]:
  """Returns the collectives of a program by kind and axes, most bytes first."""
  sums: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
  for one in instructions(program, mesh):
    count, nbytes = sums.get((one.kind, one.axes), (0, 0.0))
    sums[one.kind, one.axes] = count + one.count, nbytes + one.nbytes
  found = [Collective(*key, *values) for key, values in sums.items()]
  return sorted(found, key=lambda one: -one.nbytes)


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
  return sorted(sums.values(), key=lambda one: (not one.in_loop, one.kind))


_Found = tuple[str, hlo_text.Instruction, int, bool, bool]


def _distinct(found: Computations) -> Iterator[_Found]:
  """Yields (kind, instruction, executions, in_loop, is_async) of each collective.

  The TPU compiler splits an asynchronous collective into several fusions with the same channel, of
  which only the first is yielded; it holds the custom call AsyncCollectiveStart.
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
        # A TPU fusion of this name is a reduce-scatter.
        is_scattered = name.startswith("all-reduce-scatter")
        yield "reduce-scatter" if is_scattered else kind, one, count, in_loop, overlaps

  return walk("", 1, False, False, False)


# Operations that compute nothing.
_FREE = ("get-tuple-element", "tuple", "bitcast", "constant", "parameter", "after-all", "copy")
_FREE += ("partition-id", "replica-id", "opt-barrier", "add-dependency")


def _overlaps(computation: list[hlo_text.Instruction], index: int) -> bool:
  """Returns whether the device computes between this -start instruction and its -done."""
  start = computation[index]
  if not start.operation.endswith("-start") or '"is_sync":true' in start.attributes:
    return False
  operations = (one.operation for one in between(computation, index))
  return any(
    one not in _FREE and not one.endswith(("-start", "-done")) and not one.startswith(COLLECTIVES)
    for one in operations
  )


def between(computation: list[hlo_text.Instruction], index: int) -> Iterator[hlo_text.Instruction]:
  """Yields the instructions between a -start instruction and its -done.

  The text of a compiled program is in execution order. A start that a loop body returns is done in
  the next iteration.
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


def _carried(computation: list[hlo_text.Instruction], index: int) -> str:
  """Returns the name of element `index` of a loop body's parameter; empty if it is unused."""
  parameters = [one.name for one in computation if one.operation == "parameter"]
  for one in computation:
    is_part = one.operation == "get-tuple-element" and one.operands == parameters
    if is_part and re.search(rf"\bindex={index}\b", one.attributes):
      return one.name
  return ""


def channel(one: hlo_text.Instruction) -> str | None:
  """Returns the number of a collective's channel; None if it has none."""
  match = re.search(r"channel_id=(\d+)", one.attributes)
  return match[1] if match else None


def _key(kind: str, one: hlo_text.Instruction) -> tuple[str, ...]:
  return kind, channel(one) or one.name, str([shape.dims for shape in one.outputs])


def result_bytes(one: hlo_text.Instruction) -> int:
  """Returns the bytes of a collective's result on one device.

  The outputs of a -start may include its operands before the results, and counters after them.
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


def groups(attributes: str, num_devices: int) -> list[list[int]]:
  """Returns the mesh positions of each replica group, or of each pair of a permute.

  Pairs of a device with itself are left out. Of groups that a rule describes, only the first.

  Raises:
    ValueError: The notation of the groups is unknown.
  """
  if match := _MESH.search(attributes):  # mesh['axis_0'=16,'axis_1'=16] {'axis_1'}
    sizes = dict(re.findall(r"'([^']*)'=(\d+)", match[1]))
    grouped = re.findall(r"'([^']*)'", match[4])
    index = tuple(slice(None) if name in grouped else 0 for name in sizes)
    ids = _iota(match[2] or str(num_devices), match[3])
    return [ids.reshape([int(size) for size in sizes.values()])[index].ravel().tolist()]
  if match := _IOTA.search(attributes):  # [32,8]<=[8,32]T(1,0)
    return [_iota(match[2], match[3]).reshape(_numbers(match[1]))[0].tolist()]
  if match := _LISTS.search(attributes):  # {{0,1},{2,3}}, or pairs, whose ends may be the same
    found = [_numbers(text) for text in re.findall(r"\{([\d,]+)\}", match[1])]
    return [group for group in found if len(set(group)) > 1] or [found[0][:1]]
  if re.search(r"replica_groups=(?!\{\})", attributes):
    raise ValueError(f"unknown notation of replica groups: {attributes}")
  return [list(range(num_devices))]


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
  """Returns the bytes that each device sends in one run of the program."""
  return math.fsum(one.nbytes for one in found)
