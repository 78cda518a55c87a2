# SPDX-License-Identifier: Apache-2.0
"""Compiled HLO text, and what tests ask of it; `paxlike.compilation` has what users ask."""

import math
import re
from collections.abc import Mapping
from typing import Any

import jax

from paxlike.compilation.hlo_text import COLLECTIVES, Instruction, computations


def text(function: Any, *arrays: Any, options: Mapping[str, Any] | None = None) -> str:
  """Returns the HLO text of what is compiled for the devices of arrays, or of their shapes.

  Args:
    function: A function, also one that is jitted, lowered (without arrays) or compiled already.
    arrays: Its arguments.
    options: Those of the compiler.
  """
  if not isinstance(function, jax.stages.Compiled):
    if not isinstance(function, jax.stages.Lowered):
      jitted = function if isinstance(function, jax.stages.Wrapped) else jax.jit(function)
      function = jitted.lower(*arrays)
    function = function.compile(compiler_options=None if options is None else dict(options))
  return function.as_text() or ""


def instructions(program: str) -> list[Instruction]:
  """Returns the instructions of all computations, those of loops once."""
  return [one for lines in computations(program).values() for one in lines]


def in_loops(program: str) -> list[Instruction]:
  """Returns the instructions of loops and of what they call."""
  found = computations(program)

  def of(computation: str, *, in_loop: bool) -> list[Instruction]:
    here = []
    for one in found[computation]:
      here += [one] * in_loop
      for called in one.called:
        here += of(called, in_loop=in_loop or one.operation == "while")
    return here

  return of("", in_loop=False)


def custom_calls(program: str, target: str) -> list[Instruction]:
  """Returns the calls of targets that begin so."""
  return [one for one in instructions(program) if one.target.startswith(target)]


def num_calls(program: str, target: str) -> int:
  """Returns how many calls of this very target there are."""
  return sum(one.target == target for one in instructions(program))


def collectives(program: str) -> list[Instruction]:
  """Returns the collectives; an asynchronous one is two instructions, its start and its end."""
  return [one for one in instructions(program) if one.operation.startswith(COLLECTIVES)]


def matmuls(program: str) -> list[str]:
  """Returns the names of matmuls by XLA itself, cuBLAS or Triton, without those by cuDNN."""
  return [
    one.name
    for one in instructions(program)
    if one.operation == "dot" or one.target.startswith("__cublas") or "__triton" in one.attributes
  ]


def matmul_flops(program: str) -> float:
  """Returns the FLOPs of all `dot`s of a program for a CPU, those of a loop as often as it runs."""
  found = computations(program)

  def of(computation: str) -> float:
    total, shapes = 0, {}
    for one in found[computation]:
      shapes[one.name] = one.outputs[0].dims if one.outputs else ()
      if one.operation == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", one.attributes)
        assert contracted
        sizes = [shapes[one.operands[0]][int(dim)] for dim in contracted[1].split(",")]
        total += 2 * math.prod(shapes[one.name]) * math.prod(sizes)
      total += one.times(found) * sum(of(called) for called in one.called)
    return total

  return of("")
