# SPDX-License-Identifier: Apache-2.0
"""Operations of JAX programs."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any, inside: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
  """Yields each equation, and the names of the operations in whose programs it is."""
  for equation in jaxpr.eqns:
    yield equation, inside
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
      if _is_program(value):
        program = getattr(value, "jaxpr", value)
        yield from equations(program, (*inside, equation.primitive.name))


def _is_program(value: Any) -> bool:
  return hasattr(getattr(value, "jaxpr", value), "eqns")
