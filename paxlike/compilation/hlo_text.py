# SPDX-License-Identifier: Apache-2.0
"""A parser of compiled HLO text, `compiled.as_text()`."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# XLA's name of an element type -> bits.
_BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32}
_BITS |= {"s64": 64, "u64": 64, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}
_BITS |= {"c64": 64, "c128": 128, "s2": 2, "u2": 2, "f4e2m1fn": 4, "f8e8m0fnu": 8}
_BITS |= dict.fromkeys(("f8e4m3", "f8e4m3fn", "f8e4m3fnuz", "f8e5m2", "f8e5m2fnuz", "f8e3m4"), 8)
_NO_ARRAYS = ("token", "opaque")

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all")
COLLECTIVES += ("collective-permute", "collective-broadcast")
#: In the `op_name` of what the optimizer computes: its named scope in a train step.
OPTIMIZER = "/optimizer/"

_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,]*)\](\{[0-9,]*)?(?::[^{}\s]*?S\((\d+)\))?")
_HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_LINE = re.compile(
  r"\s+(?:ROOT )?%([\w.\-]+) = (\([^=]*?\)(?=\s[\w\-]+\()|[^\s(]\S*) ([\w\-]+)\(([^)]*)\)(.*)"
)
_CALLED = re.compile(r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_SEVERAL_CALLED = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")


class Shape(NamedTuple):
  """An array's dtype and shape, with its layout in XLA's notation and its memory space.

  Space 0 is the device's memory; on TPUs, 1 is the vector memory beside the matrix units.
  """

  dtype: str
  dims: tuple[int, ...]
  layout: str = ""
  space: int = 0

  @property
  def nbytes(self) -> int:
    """The size in bytes."""
    return math.prod(self.dims) * _BITS[self.dtype] // 8


class Instruction(NamedTuple):
  """One HLO instruction.

  Attributes:
    name, operation: As in the text.
    outputs: Its output arrays.
    operands: Names of the instructions whose outputs it takes.
    literal: The text between the parentheses; the value of a constant.
    attributes: The rest of the line.
  """

  name: str
  operation: str
  outputs: list[Shape]
  operands: list[str]
  literal: str
  attributes: str

  @property
  def called(self) -> list[str]:
    """The computations that it calls, all branches of a conditional included."""
    several = _SEVERAL_CALLED.search(self.attributes)
    of_them = re.findall(r"%([\w.\-]+)", several[1]) if several else []
    return _CALLED.findall(self.attributes) + of_them

  @property
  def target(self) -> str:
    """The target of a custom call; empty for other operations."""
    match = re.search(r'custom_call_target="([^"]+)"', self.attributes)
    return match[1] if match else ""

  @property
  def op_name(self) -> str:
    """The `op_name` that JAX gave the operation; empty if XLA made the instruction."""
    # XLA names what it makes after itself, such as broadcast.76; arguments are state.params['x'].
    match = re.search(r'op_name="([^"]*/[^"]*)"', self.attributes)
    return match[1] if match else ""

  def times(self, found: "Computations") -> int:
    """Returns how often it runs what it calls: the trip count of a loop, else 1."""
    if self.operation != "while":
      return 1
    if match := re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes):
      return int(match[1])
    # JAX's scans count from 0 up to a constant, and so do XLA's loops around matmuls.
    condition = re.search(r"condition=%([\w.\-]+)", self.attributes)
    lines = found.get(condition[1], []) if condition else []
    limits = [one.literal for one in _fused(lines, found) if one.operation == "constant"]
    limit = max((int(limit) for limit in limits if limit.isdecimal()), default=1)
    counters = [
      one for one in lines if one.operation == "get-tuple-element" and not one.outputs[0].dims
    ]
    steps = [_steps(found.get(self.called[0], []), one, found) for one in counters]
    return max(1, limit // max(steps, default=1))


Computations = dict[str, list[Instruction]]


def _fused(lines: list[Instruction], found: Computations) -> list[Instruction]:
  """Returns instructions, and those inside fusions."""
  fusions = [one for one in lines if one.operation == "fusion"]
  return lines + [inner for one in fusions for name in one.called for inner in found.get(name, [])]


def _steps(body: list[Instruction], counter: Instruction, found: Computations) -> int:
  """Returns by how much a loop's body increments a counter: more than 1 if it is unrolled."""
  match = re.search(r"\bindex=(\d+)", counter.attributes)
  if match is None or not body or int(match[1]) >= len(body[-1].operands):
    return 1
  added = _added(body[-1].operands[int(match[1])], {one.name: one for one in body}, found)
  return max(added, default=1)


def _added(name: str, lines: dict[str, Instruction], found: Computations) -> list[int]:
  """Returns the constants that an instruction adds, which may be one of a fusion's outputs."""
  one, place = lines.get(name), 0
  if one is not None and one.operation == "get-tuple-element":
    match = re.search(r"\bindex=(\d+)", one.attributes)
    one, place = lines.get(one.operands[0]), int(match[1]) if match else 0
  while one is not None and one.operation == "fusion" and found.get(one.called[0]):
    given, inside = one.operands, {inner.name: inner for inner in found[one.called[0]]}
    root = found[one.called[0]][-1]
    name = root.operands[place] if root.operation == "tuple" else root.name
    outside, lines, one, place = lines, inside, inside.get(name), 0
    # A fusion's parameters stand for the operands that it is given.
    for inner in inside.values():
      if inner.operation == "parameter" and int(inner.literal) < len(given):
        operand = outside.get(given[int(inner.literal)])
        lines = lines | ({} if operand is None else {inner.name: operand})
  if one is None or one.operation != "add":
    return []
  operands = [lines[name] for name in one.operands if name in lines]
  return [int(o.literal) for o in operands if o.operation == "constant" and o.literal.isdecimal()]


def computations(program: str) -> Computations:
  """Returns computation name -> instructions; the entry computation has the name "".

  Work that TPUs give to their SparseCores is returned in the form of other asynchronous work: an
  async-start that calls a computation, and an async-done.
  """
  found: Computations = {}
  current: list[Instruction] = []
  for line in program.splitlines():
    if head := _HEAD.match(line):
      current = found["" if head[1] else head[2]] = []
    elif match := _LINE.match(re.sub(r"/\*[^*]*\*/", "", line)):
      name, outputs, operation, operands, attributes = match.groups()
      names = re.findall(r"%([\w.\-]+)", operands)
      current.append(Instruction(name, operation, _shapes(outputs), names, operands, attributes))
  return {name: list(_of_sparse_cores(lines)) for name, lines in found.items()}


def _of_sparse_cores(lines: list[Instruction]) -> Iterator[Instruction]:
  """Yields instructions, those of SparseCores as async-start and async-done.

  A custom-call-start only loads the program that a custom-call-update starts, with its operands.
  """
  starts = {one.name: one for one in lines if one.operation == "custom-call-start" and one.called}
  updates = [one for one in lines if one.operation == "custom-call-update"]
  started_by_update = {name for one in updates for name in one.operands[:1] if name in starts}
  begun: set[str] = set()
  for one in lines:
    if one.name in started_by_update:
      continue
    if one in updates and one.operands[0] in started_by_update:
      begun.add(one.name)
      yield one._replace(operation="async-start", attributes=starts[one.operands[0]].attributes)
    elif one.name in starts or (one.operation == "call-start" and one.called):
      begun.add(one.name)
      yield one._replace(operation="async-start")
    elif one.operation in ("call-done", "custom-call-done") and begun.intersection(one.operands):
      yield one._replace(operation="async-done")
    else:
      yield one


def _shapes(text: str) -> list[Shape]:
  return [
    Shape(dtype, tuple(int(size) for size in dims.split(",") if size), layout, int(space or 0))
    for dtype, dims, layout, space in _SHAPE.findall(text)
    if dtype not in _NO_ARRAYS
  ]
