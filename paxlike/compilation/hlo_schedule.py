# SPDX-License-Identifier: Apache-2.0
"""What a program computes while its collectives run, given how long each instruction takes."""

from collections.abc import Mapping
from typing import NamedTuple

from paxlike.compilation import hlo_collectives
from paxlike.compilation.hlo_text import COLLECTIVES, Computations, Instruction, computations


class Transfer(NamedTuple):
  """The schedule of a collective.

  Attributes:
    name: The instruction, for asynchronous ones the start.
    count: Runs per run of the program.
    between: The instructions between start and done; none if it is synchronous.
  """

  name: str
  count: int
  between: tuple[str, ...]


def transfers(program: str) -> list[Transfer]:
  """Returns the collectives of a compiled program, given its HLO text."""
  found = computations(program)
  return _transfers(found, "", 1)


def _transfers(found: Computations, name: str, count: int) -> list[Transfer]:
  result = []
  lines = found.get(name, [])
  for index, one in enumerate(lines):
    if _begins(one, found):
      is_sync = '"is_sync":true' in one.attributes or not one.operation.endswith("-start")
      between = () if is_sync else hlo_collectives.between(lines, index)
      result.append(Transfer(one.name, count, tuple(other.name for other in between)))
    elif one.operation in ("while", "call", "conditional"):
      for called in one.called:
        result += _transfers(found, called, count * one.times(found))
  return result


def _begins(one: Instruction, found: Computations) -> bool:
  """Returns whether a collective starts here, also one that is wrapped in an async-start."""
  if one.operation == "async-start":
    return any(_begins(inner, found) for called in one.called for inner in found.get(called, ()))
  return one.operation.startswith(COLLECTIVES) and not one.operation.endswith("-done")


def exposed(program: str, costs: Mapping[str, float]) -> tuple[float, float]:
  """Returns (seconds that computation does not hide, total seconds) of all collectives.

  Args:
    program: The HLO text.
    costs: Instruction -> its seconds; those that are missing take none.
  """
  left = whole = 0.0
  found = transfers(program)
  moving = {one.name for one in found}
  for one in found:
    cost = costs.get(one.name, 0.0)
    beside = sum(costs.get(name, 0.0) for name in one.between if name not in moving)
    whole += one.count * cost
    left += one.count * max(0.0, cost - beside)
  return left, whole
