# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint of a run by an evaluation metric, and early stopping."""

import dataclasses
import json
import math
import sys
from collections.abc import Collection, Mapping

import jax
from etils import epath

from paxlike import file_io, run_folder
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError, did_you_mean
from paxlike.processes.host_collectives import broadcast
from paxlike.telemetry import run_status
from paxlike.telemetry.run_status import lacks_evaluation
from paxlike.training.evaluation import EvalSet, Result

FILE = "best.json"


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Criterion:
  """How checkpoints are compared.

  Attributes:
    metric: "SET/METRIC", such as "validation/log_pplx".
    lowest: Whether lower is better.
    patience: Evaluations in a row without improvement that end the run; None: no limit.
  """

  metric: ranges.Name
  lowest: bool
  patience: ranges.Positive | None = None

  def check(self, eval_data: Mapping[str, EvalSet]):
    """Raises a UserError if no eval set has the metric, or `patience` is below 1."""
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
    """Returns the first step with the best value, ignoring NaN; None if there is none."""
    numbers = {step: value for step, value in values.items() if not math.isnan(value)}
    sign = 1 if self.lowest else -1
    return min(numbers, key=lambda step: sign * numbers[step], default=None)


class BestTracker:
  """Tracks a run's best checkpoint, in a file in its folder so that a resumed run continues."""

  def __init__(self, folder: epath.Path, criterion: Criterion | None, *, saving: bool = True):
    """Reads earlier values of the same metric; without a criterion, no checkpoint is ever best.

    A run that saves no checkpoints (`saving` is false) writes no file. A damaged file is reported
    and ignored.
    """
    self._path = folder / FILE
    self._criterion = criterion
    self._saving = saving
    self._values: dict[int, float] = {}
    recorded = None
    try:
      recorded = _read(self._path)
    except UserError as error:
      print(f"paxlike: {error}", file=sys.stderr)
    if recorded is not None and criterion is not None and recorded[0].metric == criterion.metric:
      self._values = recorded[1]

  def forget(self, *, after: int):
    """Drops the values of steps beyond `after`, where a run is resumed."""
    self._values = {step: value for step, value in self._values.items() if step <= after}

  def forget_results(self, *, after: int):
    """Removes the results of evaluations beyond step `after`, to which the run has rolled back."""
    if jax.process_index() == 0:
      with run_folder.writing(self._path.parent):
        for result in run_status.results_after(self._path.parent, after):
          result.unlink(missing_ok=True)
        if self._criterion is not None and self._path.exists():
          self._write()

  @property
  def step(self) -> int | None:
    """Step of the best checkpoint; None before the first evaluation."""
    return None if self._criterion is None else self._criterion.best(self._values)

  @property
  def is_hopeless(self) -> bool:
    """Whether the patience is exhausted, so that the run should end."""
    best, criterion = self.step, self._criterion
    if best is None or criterion is None or criterion.patience is None:
      return False
    return sum(step > best for step in self._values) >= criterion.patience

  def lacks_evaluation(self, step: int, names: Collection[str]) -> bool:
    """Returns whether an evaluation of the eval sets `names` after `step` updates is missing.

    Each process must call this, and all get the same answer.
    """

    def lacking() -> list[int]:
      lacks = self._criterion is not None and step not in self._values
      return [step] if lacks or lacks_evaluation(self._path.parent, names, step) else []

    return bool(broadcast(lacking))

  def evaluated(self, results: Mapping[str, Result], step: int) -> bool:
    """Records an evaluation after `step` updates; returns whether it is the best so far."""
    if self._criterion is None:
      return False
    self._values[step] = self._criterion.value(results)
    if self._saving and jax.process_index() == 0:
      with run_folder.writing(self._path.parent):
        self._write()
    return self.step == step

  def _write(self):
    assert self._criterion is not None
    values = list(self._values.items())
    how = {"metric": self._criterion.metric, "lowest": self._criterion.lowest}
    record = {**how, "step": self.step, "values": values}
    file_io.write(self._path, json.dumps(record) + "\n")


def step_of(folder: epath.PathLike) -> int:
  """Returns the step of the best existing checkpoint of the run in `folder`.

  Raises:
    UserError: It is unknown, or no longer exists.
  """
  folder = epath.Path(folder)
  recorded = _read(folder / FILE)
  if recorded is None:
    raise UserError(f"{folder} records no best checkpoint: it ran without BEST_CHECKPOINT_METRIC.")
  criterion, values = recorded
  there = Checkpoints(folder / "checkpoints", keep=None).steps()
  best = criterion.best({step: value for step, value in values.items() if step in there})
  if best is None:
    raise UserError(f"{folder} no longer has any of the checkpoints that {FILE} compares.")
  return best


def _read(path: epath.Path) -> tuple[Criterion, dict[int, float]] | None:
  """Returns a run's criterion and step -> value; None if it recorded none."""
  if not path.exists():
    return None
  try:
    record = json.loads(file_io.read_bytes(path))
    values = {int(step): float(value) for step, value in record["values"]}
    return Criterion(metric=record["metric"], lowest=record["lowest"]), values
  except (OSError, *file_io.MALFORMED) as error:
    raise UserError(
      f"{path} is damaged ({file_io.reason(error)}): which checkpoint was best is unknown."
    ) from error
