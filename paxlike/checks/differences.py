# SPDX-License-Identifier: Apache-2.0
"""How far apart two training steps are, and how far rounding alone may bring them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paxlike.checks.check import ABSENT, FAIL, PASS, Check, largest_error, scale

ITEM = "training step"


class Limits(NamedTuple):
  """What rounding explains.

  Attributes:
    loss: Of the error of the loss, relative to it.
    gradient: Of the norm of each gradient's error, relative to that of the gradient.
    total: Of the norm of all gradients, and of their scale: what a factor in all of them changes.
    floor: A gradient counts as no smaller than this share of the root mean square of all: some, as
      those of the biases of keys, are zero but for rounding.
    note: A line about these limits.
  """

  loss: float
  gradient: float
  total: float
  floor: float
  note: str = ""


# In float32 sums are in another order; in fewer bits, what is multiplied is rounded too. The limits
# of gradients are then raised to twice what rounding changes on one device, at most to a half.
FLOAT32 = Limits(loss=2e-4, gradient=2e-4, total=2e-4, floor=1e-2)
ROUNDED = Limits(loss=5e-3, gradient=0.03, total=0.01, floor=0.1)
ROUTED = Limits(
  loss=5e-3,
  gradient=0.2,
  total=0.03,
  floor=0.1,
  note="coarse, as rounding has routers choose other experts",
)
# Of what the optimizer makes of the same gradients. Weights and moments in bfloat16 are rounded
# stochastically: where float32 differs in its last bit, a number may be rounded the other way.
UPDATE = 1e-3
# Gradients as small, relative to the root mean square of all, are zero but for rounding.
_ZERO = 1e-4


class Step(NamedTuple):
  """The results of a step.

  Attributes:
    loss: Its value.
    norm: That of all gradients together, as the step reports it.
    gradients: By the name of a weight, layer by layer.
    state: What layers update themselves, such as the biases of routers, in the same way.
    update: The error of each array that the optimizer changed, by name.
  """

  loss: float
  norm: float
  gradients: dict[str, np.ndarray]
  state: Mapping[str, np.ndarray] = {}
  update: Mapping[str, float] = {}


def compare(
  label: str,
  got: Step,
  expected: Step,
  limits: Limits,
  exact: Step | None = None,
  *,
  may_be_same: bool = False,
) -> list[Check]:
  """Returns the checks that loss, norm, every gradient and the update are right.

  Args:
    label: What the names of the checks begin with.
    got: On the mesh.
    expected: On one device.
    limits: What rounding explains.
    exact: On one device in float32, where the others are in fewer bits.
    may_be_same: Whether equal bits mean that both were the same program.
  """
  total = limits.total
  if exact is not None:
    total = min(max(total, 2 * abs(_scale(expected, exact) - 1)), 0.5)
  limits = limits._replace(total=total)
  values = _values(f"{label}: loss and norm", got, expected, limits)
  gradients = _gradients(f"{label}: gradients", got, expected, limits, exact)
  checks = [values, gradients]
  if may_be_same and not any(values.figures.values()) and not gradients.figures["worst gradient"]:
    detail = "one device, the same program: nothing to compare"
    checks = [Check(item=ITEM, name=label, verdict=ABSENT, detail=detail)]
  if got.update:
    checks.append(_update(f"{label}: update", got, expected))
  return checks


def _values(name: str, got: Step, expected: Step, limits: Limits) -> Check:
  loss, norm = _relative(got.loss, expected.loss), _relative(got.norm, expected.norm)
  return Check(
    item=ITEM,
    name=name,
    verdict=PASS if loss <= limits.loss and norm <= limits.total else FAIL,
    figures={"loss": loss, "grad norm": norm},
    detail=f"loss {got.loss:.6g}, on one device {expected.loss:.6g};"
    f" grad norm {got.norm:.6g}, on one device {expected.norm:.6g};"
    f" tolerances {limits.loss:.2g} and {limits.total:.2g}",
  )


def _relative(a: float, b: float) -> float:
  return abs(a - b) / max(abs(b), 1e-30)


def _gradients(name: str, got: Step, expected: Step, limits: Limits, exact: Step | None) -> Check:
  errors, off = _errors(got, expected, limits.floor), abs(_scale(got, expected) - 1)
  allowed = dict.fromkeys(errors, limits.gradient)
  if exact is not None:
    # Two steps that are rounded differently may be twice as far apart as each is from float32. Half
    # of a gradient is never explained by rounding.
    rounding = _errors(expected, exact, limits.floor)
    allowed = {n: min(max(limits.gradient, 2 * error), 0.5) for n, error in rounding.items()}
  wrong = [n for n, error in errors.items() if not error <= allowed[n]]
  zero = _zeros(expected if exact is None else exact)
  named = [n for n in errors if n not in zero or n in wrong] or list(errors)
  worst = max(named, key=lambda n: np.nan_to_num(errors[n] / allowed[n], nan=np.inf))
  same = got.gradients.keys() == expected.gradients.keys()
  detail = f"worst of {len(named)} gradients: {worst}"
  detail += f" ({len(wrong)} wrong)" if wrong else ""
  if not off <= limits.total:
    detail += f"; together they are off by {off:.2g}, more than {limits.total:.2g}"
  detail += f"; {len(zero)} more are zero but for rounding" if zero else ""
  detail += f"; {limits.note}" if limits.note else ""
  return Check(
    item=ITEM,
    name=name,
    verdict=PASS if same and not wrong and off <= limits.total else FAIL,
    figures={"worst gradient": errors[worst], "tolerance": allowed[worst], "scale": off},
    detail=detail,
  )


def _errors(got: Step, expected: Step, floor: float) -> dict[str, float]:
  """Returns the norm of the difference of each gradient, relative to that of `expected`."""
  mean = _root_mean_square(expected)
  return {
    name: float(np.linalg.norm(got.gradients.get(name, np.nan) - exact))
    / max(float(np.linalg.norm(exact)), floor * mean * exact.size**0.5, 1e-30)
    for name, exact in expected.gradients.items()
  }


def _scale(got: Step, expected: Step) -> float:
  """Returns the scale of all gradients together, which rounding hardly changes."""
  return scale(
    (got.gradients.get(name, np.nan), exact) for name, exact in expected.gradients.items()
  )


def _zeros(step: Step) -> set[str]:
  """Returns the names of the gradients that are zero but for rounding."""
  least = _ZERO * _root_mean_square(step)
  return {n for n, g in step.gradients.items() if np.linalg.norm(g) <= least * g.size**0.5}


def _root_mean_square(step: Step) -> float:
  total = sum(float((g.astype(np.float64) ** 2).sum()) for g in step.gradients.values())
  return (total / sum(g.size for g in step.gradients.values())) ** 0.5


def _update(name: str, got: Step, expected: Step) -> Check:
  """Returns the check of what the optimizer made of the gradients, and layers of what they saw."""
  errors = dict(got.update)
  for n, array in expected.state.items():
    errors[n] = largest_error(got.state[n], array) if n in got.state else float("nan")
  worst = max(errors, key=lambda n: np.nan_to_num(errors[n], nan=np.inf))
  wrong = sum(not error <= UPDATE for error in errors.values())
  return Check(
    item=ITEM,
    name=name,
    verdict=FAIL if wrong else PASS,
    figures={"error": errors[worst], "tolerance": UPDATE},
    detail=f"worst of {len(errors)} weights and moments: {worst}"
    + (f" ({wrong} wrong)" if wrong else ""),
  )
