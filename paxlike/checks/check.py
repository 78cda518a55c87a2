# SPDX-License-Identifier: Apache-2.0
"""The result of a check, and the comparison of arrays."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from paxlike.errors import RunError, UserError

PASS, FAIL, REFUSED, ABSENT = "pass", "FAIL", "refused", "not here"

# Exceptions of JAX, XLA, Triton and Mosaic for programs that they cannot trace, compile or run;
# `JaxRuntimeError` and `NotImplementedError` are RuntimeErrors.
_FAILURES = (RuntimeError, ValueError, TypeError, ArithmeticError, OSError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """The result of one check.

  Attributes:
    item: The group of the check, such as "attention".
    name: What was checked.
    verdict: PASS, FAIL, REFUSED (the kernel does not support the case) or ABSENT (nothing to
      check).
    figures: Name -> measured value; a name with a slash is a unit ("GB/s").
    detail: One line for people.
  """

  item: str
  name: str
  verdict: str
  figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
  detail: str = ""


def compared(
  item: str,
  name: str,
  got: Mapping[str, Any],
  expected: Mapping[str, Any],
  tolerance: float,
  detail: str = "",
) -> Check:
  """Compares arrays by their `largest_error` and their `scale`.

  Rounding changes the scale far less than single numbers, so its limit is a quarter of the
  tolerance. NaN errors fail.
  """
  errors = {what: largest_error(got[what], x) for what, x in expected.items()}
  scales = {what: abs(scale([(got[what], x)]) - 1) for what, x in expected.items()}
  bad = [f"{what} {error:.2g}" for what, error in errors.items() if not error <= tolerance]
  bad += [
    f"scale of {what} {error:.2g}"
    for what, error in scales.items()
    if errors[what] <= tolerance and not error <= tolerance / 4
  ]
  worst = max(errors.values(), key=lambda error: np.nan_to_num(error, nan=np.inf))
  return Check(
    item=item,
    name=name,
    verdict=FAIL if bad else PASS,
    figures={"error": worst, "tolerance": tolerance},
    detail="; ".join([*filter(None, [detail]), *([f"wrong: {', '.join(bad)}"] if bad else [])]),
  )


def guarded(
  item: str, name: str, function: Callable[[], Check], *, may_refuse: bool = False
) -> Check:
  """Returns the result of `function`, or a failed check if it raises.

  Args:
    item: Group of the failed check.
    name: Name of the failed check.
    function: Runs the check.
    may_refuse: Whether a UserError gives REFUSED instead of FAIL.
  """
  return all_guarded(item, name, lambda: [function()], may_refuse=may_refuse)[0]


def all_guarded(
  item: str, name: str, function: Callable[[], list[Check]], *, may_refuse: bool = False
) -> list[Check]:
  """Like `guarded`, for a function that returns several checks."""
  try:
    return function()
  except UserError as error:
    verdict = REFUSED if may_refuse else FAIL
    return [Check(item=item, name=name, verdict=verdict, detail=_line(error))]
  except (RunError, *_FAILURES) as error:
    detail = f"{type(error).__name__}: {_line(error)}"
    return [Check(item=item, name=name, verdict=FAIL, detail=detail)]


def _line(error: BaseException) -> str:
  return " ".join(str(error).split())[:300]


def largest_error(got: Any, expected: Any) -> float:
  """Returns the largest absolute difference, relative to the largest absolute value expected."""
  got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
  if got.shape != expected.shape:
    return float("inf")
  largest = np.abs(expected).max(initial=0)
  difference = np.abs(got - expected).max(initial=0)
  return float(difference / largest) if largest else float(difference)


def scale(pairs: Iterable[tuple[Any, Any]]) -> float:
  """Returns the least-squares factor from expected arrays to actual ones; 1 if all are 0.

  Args:
    pairs: (actual, expected) arrays.
  """
  along = square = 0.0
  for got, expected in pairs:
    expected = np.asarray(expected, np.float64)
    along += float((np.asarray(got, np.float64) * expected).sum())
    square += float((expected**2).sum())
  return along / square if square else 1.0


def tolerance(dtype: Any, *, roundings: int = 2) -> float:
  """Returns the error that rounding explains, relative to the largest value of an array.

  Sums are float32 in every dtype. In bfloat16, errors come from `roundings` consecutive roundings
  of operands and results; in float32, from the order of sums.
  """
  dtype = jnp.dtype(dtype)
  return (roundings if dtype.itemsize == 2 else 64) * float(jnp.finfo(dtype).eps)


def placed(array: np.ndarray, where: jax.sharding.Sharding) -> jax.Array:
  """Returns a global array from a NumPy array that is the same in all processes."""
  return jax.make_array_from_callback(array.shape, where, lambda index: array[index])


def fetched(tree: Any) -> Any:
  """Returns the global values of sharded arrays as NumPy arrays, in all processes."""
  if all(x.is_fully_addressable for x in jax.tree.leaves(tree)):
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def is_cpu(devices: jax.sharding.Mesh) -> bool:
  """Returns whether a mesh is of CPUs, on which checks use small sizes."""
  return devices.devices.flat[0].platform == "cpu"
