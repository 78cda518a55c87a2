# SPDX-License-Identifier: Apache-2.0
"""A scaling law: the loss of a model of N parameters trained on D tokens.

    L(N, D) = E + A / N^alpha + B / D^beta

is fitted to the runs of a sweep as in Approach 3 of Hoffmann et al. (2022, arXiv:2203.15556): by
the Huber loss of the difference of log L, from several starts. As Besiroglu et al. (2024,
arXiv:2404.10102) recommend, the losses of the runs are summed, not averaged, since an average ends
the minimization early, and intervals are those of a bootstrap over the runs.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize

from paxlike.errors import UserError

#: Where the Huber loss of log L becomes linear, as in both papers.
DELTA = 1e-3
MIN_RUNS, MIN_SIZES = 6, 3
_EXPONENTS = np.linspace(0.1, 1.5, 8)  # Starts of alpha and beta.
_REFINED = 8  # The best of the starts.
_LEAST_CHANGE = 1e-3  # Of the loss, relative, that N and D must each explain.
_FLOPS_PER_WEIGHT = 6  # Of training on a token: C = 6 N D.


class Points(NamedTuple):
  """Finished runs, each an entry of arrays [R].

  Attributes:
    params: N.
    tokens: D.
    loss: L, in nats per token.
  """

  params: np.ndarray
  tokens: np.ndarray
  loss: np.ndarray

  def at(self, index: np.ndarray) -> "Points":
    """Returns the runs at these indexes."""
    return Points(*(array[index] for array in self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScalingLaw:
  """A fitted law; see the module."""

  E: float
  A: float
  B: float
  alpha: float
  beta: float

  def loss(self, params: Any, tokens: Any) -> Any:
    """Returns L for N parameters and D tokens: numbers, or arrays of them."""
    with np.errstate(all="ignore"):  # Of an extreme resample, for a target far away.
      params, tokens = np.asarray(params, float), np.asarray(tokens, float)
      return self.E + self.A * params**-self.alpha + self.B * tokens**-self.beta

  def optimum(self, flops: float) -> tuple[float, float]:
    """Returns the (N, D) of least loss with 6 N D = `flops`."""
    with np.errstate(all="ignore"):
      product = np.log(flops / _FLOPS_PER_WEIGHT)
      ratio = np.log(self.alpha * self.A) - np.log(self.beta * self.B)
      params = (ratio + self.beta * product) / (self.alpha + self.beta)
      return float(np.exp(params)), float(np.exp(product - params))


def check(points: Points):
  """Raises a UserError if these runs do not determine the five numbers of a law."""
  if len(points.loss) < MIN_RUNS:
    raise UserError(f"{len(points.loss)} runs: a law needs at least {MIN_RUNS}.")
  for what, values in (("sizes of the model", points.params), ("numbers of tokens", points.tokens)):
    if len(np.unique(values)) < MIN_SIZES:
      raise UserError(
        f"the runs have {len(np.unique(values))} {what}: a law needs at least {MIN_SIZES}."
      )
  if abs(np.corrcoef(np.log(points.params), np.log(points.tokens))[0, 1]) > 0.999:
    raise UserError(
      "the tokens of the runs follow from the size of the model, so that the two have no separate"
      " effects: train at least one size on more or fewer tokens."
    )


def fit(points: Points) -> ScalingLaw:
  """Returns the law of the runs.

  Raises:
    UserError: They are too few or do not determine it, or the loss does not fall with N or with D.
  """
  check(points)
  law = _least(points, _starts(points))
  for what, scale, exponent, values in (
    ("the size of the model", law.A, law.alpha, points.params),
    ("the tokens", law.B, law.beta, points.tokens),
  ):
    if np.ptp(scale / values**exponent) < _LEAST_CHANGE * points.loss.min():
      raise UserError(
        f"by the best law the loss does not fall with {what}: give runs of a larger range."
      )
  return law


def bootstrap(points: Points, law: ScalingLaw, *, times: int, seed: int = 0) -> list[ScalingLaw]:
  """Returns laws of `times` resamples of the runs, each from the `law` of all and a few starts.

  A resample that does not determine a law is drawn again.

  Raises:
    UserError: Hardly any resample does.
  """
  rng, laws = np.random.default_rng(seed), []
  for _ in range(20 * times):
    if len(laws) == times:
      break
    sample = points.at(rng.integers(len(points.loss), size=len(points.loss)))
    if len({*zip(sample.params, sample.tokens, strict=True)}) < MIN_RUNS - 1:
      continue
    try:
      check(sample)
    except UserError:
      continue
    laws.append(_least(sample, [_packed(law), *_starts(sample)[:2]]))
  if len(laws) < times:
    raise UserError("too few runs for a bootstrap: give more, or set --bootstrap=0.")
  return laws


def interval(laws: list[ScalingLaw], value: Callable[[ScalingLaw], float]) -> tuple[float, float]:
  """Returns the central 95 % of a value over bootstrapped laws."""
  low, high = np.percentile([value(law) for law in laws], [2.5, 97.5])
  return float(low), float(high)


def _packed(law: ScalingLaw) -> np.ndarray:
  tiny = np.finfo(float).tiny
  logs = (np.log(max(x, tiny)) for x in (law.E, law.A, law.B))
  return np.array([*logs, law.alpha, law.beta])


def _starts(points: Points) -> list[np.ndarray]:
  """Returns log E, log A, log B, alpha, beta of the best starts, the best first.

  For given exponents, the law is linear in E, A and B: each start is its nonnegative least-squares
  solution, relative to the losses.
  """
  found = []
  for alpha, beta in itertools.product(_EXPONENTS, _EXPONENTS):
    # Divided by their largest values, so that all columns are of the order of 1.
    scales = np.array([1.0, points.params.min() ** alpha, points.tokens.min() ** beta])
    columns = np.stack([0 * points.loss + 1, points.params**-alpha, points.tokens**-beta], -1)
    solution, error = optimize.nnls(columns * scales / points.loss[:, None], 0 * points.loss + 1)
    logs = np.log(np.maximum(solution, 1e-3) * scales)
    found.append((error, np.array([*logs, alpha, beta])))
  return [start for _, start in sorted(found, key=lambda one: one[0])[:_REFINED]]


def _least(points: Points, starts: list[np.ndarray]) -> ScalingLaw:
  """Returns the law of least Huber loss that is found from the starts."""
  log_n, log_d, log_l = (np.log(array) for array in points)

  def terms(x: np.ndarray) -> np.ndarray:
    """Returns the logs of the terms of L, [3, R]."""
    return np.stack([x[0] + 0 * log_n, x[1] - x[3] * log_n, x[2] - x[4] * log_d])

  def residuals(x: np.ndarray) -> np.ndarray:
    return np.logaddexp.reduce(terms(x)) - log_l

  def jacobian(x: np.ndarray) -> np.ndarray:
    logs = terms(x)
    e, a, b = np.exp(logs - np.logaddexp.reduce(logs))
    return np.stack([e, a, b, -a * log_n, -b * log_d], -1)

  how: Any = {
    "jac": jacobian,
    "bounds": ([-np.inf] * 3 + [1e-3] * 2, [np.inf] * 3 + [5] * 2),
    "loss": "huber",
    "f_scale": DELTA,
    "x_scale": "jac",
    "ftol": 1e-9,
    "xtol": 1e-9,
    "gtol": 1e-12,
    "max_nfev": 300,
  }
  results = [optimize.least_squares(residuals, start, **how) for start in starts]
  e, a, b, alpha, beta = min(results, key=lambda result: result.cost).x
  return ScalingLaw(
    E=float(np.exp(e)),
    A=float(np.exp(a)),
    B=float(np.exp(b)),
    alpha=float(alpha),
    beta=float(beta),
  )
