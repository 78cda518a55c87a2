# SPDX-License-Identifier: Apache-2.0
"""The comparison of two training steps, with limits for rounding errors."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paxlike.checks.check import ABSENT, FAIL, PASS, Check, largest_error, scale

ITEM = "training step"


class Tolerances(NamedTuple):
  """Tolerances of rounding errors.

  Attributes:
    loss: Relative error of the loss.
    gradient: Norm of a gradient's error, relative to the gradient's norm.
    total: Relative error of the global gradient norm, and of the common scale of all gradients.
    floor: In relative errors, a gradient whose root mean square is below this fraction of that of
      all gradients counts as that large: some, such as those of key biases, are zero except for
      rounding.
    note: A remark on these limits for the report.
  """

  loss: float
  gradient: float
  total: float
  floor: float
  note: str = ""


# float32 steps differ by the order of sums; in lower precision, operands are rounded too. The
# limits of gradients are then raised to twice the rounding error on one device, at most to 0.5.
FLOAT32 = Tolerances(loss=2e-4, gradient=2e-4, total=2e-4, floor=1e-2)
ROUNDED = Tolerances(loss=5e-3, gradient=0.03, total=0.01, floor=0.1)
ROUTED = Tolerances(
  loss=5e-3,
  gradient=0.2,
  total=0.03,
  floor=0.1,
  note="wide limits, because rounding makes routers choose other experts",
)
# Limit for the optimizer's update. bfloat16 weights and moments use stochastic rounding: a
# difference in the last float32 bit may round a number the other way.
UPDATE = 1e-3
# Gradients below this, relative to the root mean square of all, are zero except for rounding.
_ZERO = 1e-4


class Step(NamedTuple):
  """The results of a step.

  Attributes:
    loss: The loss.
    norm: The global gradient norm that the step reports.
    gradients: Unrolled weight name -> gradient.
    state: Unrolled name -> non-trainable state, such as router biases.
    update: Name -> error of each array that the optimizer changed.
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
  limits: Tolerances,
  exact: Step | None = None,
  *,
  may_be_same: bool = False,
) -> list[Check]:
  """Returns the checks of loss, norm, all gradients and the update.

  Args:
    label: Prefix of the names of the checks.
    got: The step on the mesh.
    expected: The step on one device.
    limits: The limits of rounding errors.
    exact: The float32 step on one device, if the others have lower precision.
    may_be_same: Whether bitwise equal results mean that both ran the same program.
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


def _values(name: str, got: Step, expected: Step, limits: Tolerances) -> Check:
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


def _gradients(
  name: str, got: Step, expected: Step, limits: Tolerances, exact: Step | None
) -> Check:
  errors, off = _errors(got, expected, limits.floor), abs(_scale(got, expected) - 1)
  allowed = dict.fromkeys(errors, limits.gradient)
  if exact is not None:
    # Two steps that round differently may differ by twice the distance of each from float32. An
    # error of half a gradient is never rounding.
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
    detail += f"; their common scale is off by {off:.2g}, more than {limits.total:.2g}"
  detail += f"; {len(zero)} more are zero except for rounding" if zero else ""
  detail += f"; {limits.note}" if limits.note else ""
  return Check(
    item=ITEM,
    name=name,
    verdict=PASS if same and not wrong and off <= limits.total else FAIL,
    figures={"worst gradient": errors[worst], "tolerance": allowed[worst], "scale": off},
    detail=detail,
  )


def _errors(got: Step, expected: Step, floor: float) -> dict[str, float]:
  """Returns the norm of each gradient's difference, relative to the expected gradient's norm."""
  mean = _root_mean_square(expected)
  return {
    name: float(np.linalg.norm(got.gradients.get(name, np.nan) - exact))
    / max(float(np.linalg.norm(exact)), floor * mean * exact.size**0.5, 1e-30)
    for name, exact in expected.gradients.items()
  }


def _scale(got: Step, expected: Step) -> float:
  """Returns the common scale of all gradients, which rounding hardly changes."""
  return scale(
    (got.gradients.get(name, np.nan), exact) for name, exact in expected.gradients.items()
  )


def _zeros(step: Step) -> set[str]:
  """Returns the names of the gradients that are zero except for rounding."""
  least = _ZERO * _root_mean_square(step)
  return {n for n, g in step.gradients.items() if np.linalg.norm(g) <= least * g.size**0.5}


def _root_mean_square(step: Step) -> float:
  total = sum(float((g.astype(np.float64) ** 2).sum()) for g in step.gradients.values())
  return (total / sum(g.size for g in step.gradients.values())) ** 0.5


def _update(name: str, got: Step, expected: Step) -> Check:
  """Returns the check of the optimizer's update and of non-trainable state."""
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
