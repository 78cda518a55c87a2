# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint of a run by a metric of its evaluation, and whether one may yet be better."""

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping

import jax
from etils import epath

from paxlike import run_folder
from paxlike.checkpoints.checkpoint import Checkpoints, agreed
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError, did_you_mean
from paxlike.telemetry.run_log import lacks_evaluation
from paxlike.training.evaluation import EvalSet, Result

FILE = "best.json"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Criterion:
  """By what checkpoints are compared.

  Attributes:
    metric: "SET/METRIC", such as "validation/log_pplx".
    lowest: Whether less is better.
    patience: Evaluations in a row without a better one that end the run; None: nothing does.
  """

  metric: ranges.Name
  lowest: bool
  patience: ranges.Positive | None = None

  def check(self, eval_data: Mapping[str, EvalSet]):
    """Raises a UserError if nothing in `eval_data` gives the metric, or no patience is left."""
    names = [f"{name}/{metric}" for name, one in eval_data.items() for metric in one.names]
    if self.metric not in names:
      hint = did_you_mean(self.metric, names) or f" There is: {', '.join(names) or 'none'}."
      raise UserError(f"BEST_CHECKPOINT_METRIC={self.metric}: no such metric.{hint}")
    if self.patience is not None and self.patience < 1:
      raise UserError(f"EARLY_STOPPING_PATIENCE={self.patience} must be at least 1, or None.")

  def value(self, results: Mapping[str, Result]) -> float:
    """Returns the metric of an evaluation."""
    name, _, metric = self.metric.partition("/")
    return results[name].values[metric]

  def best(self, values: Mapping[int, float]) -> int | None:
    """Returns the step with the best value, of equals the first; one that is no number is none."""
    numbers = {step: value for step, value in values.items() if not math.isnan(value)}
    sign = 1 if self.lowest else -1
    return min(numbers, key=lambda step: sign * numbers[step], default=None)


class Best:
  """What a run knows of its best checkpoint; kept in its folder, so that a resumed run does too."""

  def __init__(self, folder: epath.Path, criterion: Criterion | None, *, saving: bool = True):
    """Reads what was found by the same criterion before; with none, nothing is ever best.

    A run that saves no checkpoints (`saving` is false) has no best one, so it writes no file. If
    what the folder says is damaged, that is printed, and nothing was found.
    """
    self._path = folder / FILE
    self._criterion = criterion
    self._saving = saving
    self._values: dict[int, float] = {}
    told = None
    try:
      told = _read(self._path)
    except UserError as error:
      print(f"paxlike: {error}", file=sys.stderr)
    if told is not None and criterion is not None and told[0].metric == criterion.metric:
      self._values = told[1]

  def forget(self, *, after: int):
    """Takes back what was found later than after so many updates, from where a run goes on."""
    self._values = {step: value for step, value in self._values.items() if step <= after}

  @property
  def step(self) -> int | None:
    """The best checkpoint; None before the first evaluation."""
    return None if self._criterion is None else self._criterion.best(self._values)

  @property
  def is_hopeless(self) -> bool:
    """Whether so many evaluations were no better that the run is to end."""
    best, criterion = self.step, self._criterion
    if best is None or criterion is None or criterion.patience is None:
      return False
    return sum(step > best for step in self._values) >= criterion.patience

  def owes(self, step: int, names: Collection[str]) -> bool:
    """Whether the eval sets `names` were not all evaluated after `step` updates.

    Each process must call this, and gets the same answer.
    """

    def lacking() -> list[int]:
      lacks = self._criterion is not None and step not in self._values
      return [step] if lacks or lacks_evaluation(self._path.parent, names, step) else []

    return bool(agreed(lacking))

  def evaluated(self, results: Mapping[str, Result], step: int) -> bool:
    """Takes note of an evaluation after `step` updates; returns whether it is the best so far."""
    if self._criterion is None:
      return False
    self._values[step] = self._criterion.value(results)
    if self._saving and jax.process_index() == 0:
      values = list(self._values.items())
      how = {"metric": self._criterion.metric, "lowest": self._criterion.lowest}
      told = {**how, "step": self.step, "values": values}
      with run_folder.writing(self._path.parent):
        run_folder.write(self._path, json.dumps(told) + "\n")
    return self.step == step


def step_of(folder: epath.PathLike) -> int:
  """Returns the best of the checkpoints that there are of the run in `folder`.

  Raises:
    UserError: That is not known.
  """
  folder = epath.Path(folder)
  told = _read(folder / FILE)
  if told is None:
    raise UserError(f"{folder} knows no best checkpoint: it ran without BEST_CHECKPOINT_METRIC.")
  criterion, values = told
  there = Checkpoints(folder / "checkpoints", keep=None).steps()
  best = criterion.best({step: value for step, value in values.items() if step in there})
  if best is None:
    raise UserError(f"{folder} has no checkpoint any more of those that {FILE} compares.")
  return best


def _read(path: epath.Path) -> tuple[Criterion, dict[int, float]] | None:
  """Returns what a run compared its checkpoints by, and the values of each."""
  if not path.exists():
    return None
  try:
    told = json.loads(run_folder.read_bytes(path))
    values = {int(step): float(value) for step, value in told["values"]}
    return Criterion(metric=told["metric"], lowest=told["lowest"]), values
  except (OSError, *run_folder.MALFORMED) as error:
    raise UserError(
      f"{path} is damaged ({run_folder.reason(error)}): which checkpoint was best is not known."
    ) from error
