# SPDX-License-Identifier: Apache-2.0
"""Data dependence of a jaxpr's outputs on its inputs."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Var

_CALLS = ("jit", "pjit", "closed_call")


def depends_on_inputs(jaxpr: Any, inputs: Sequence[bool] | None = None) -> list[bool]:
  """Returns for each output of a jaxpr whether it depends on an input.

  `inputs` selects the inputs that count; None: all. Constants of the jaxpr never count.
  """
  given = [True] * len(jaxpr.invars) if inputs is None else inputs
  tainted = {v for v, is_given in zip(jaxpr.invars, given, strict=True) if is_given}

  def is_tainted(atom: Any) -> bool:
    return isinstance(atom, Var) and atom in tainted

  for equation in jaxpr.eqns:
    reach = [is_tainted(atom) for atom in equation.invars]
    inner = equation.params.get("jaxpr")
    if equation.primitive.name in _CALLS and inner is not None:
      outputs = depends_on_inputs(getattr(inner, "jaxpr", inner), reach)
    else:
      outputs = [any(reach)] * len(equation.outvars)
    tainted |= {v for v, is_reached in zip(equation.outvars, outputs, strict=True) if is_reached}
  return [is_tainted(atom) for atom in jaxpr.outvars]
