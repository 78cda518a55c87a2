# SPDX-License-Identifier: Apache-2.0
"""Evaluation: data sets, the metrics computed on them, and the pass that joins the two."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import Dataset
from paxlike.devices.batch_placement import Feed
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.loss import cross_entropy
from paxlike.layers.module import Definition, Params
from paxlike.processes import progress


class Scores(NamedTuple):
  """What a model says of the targets of a batch, all [B, T].

  Attributes:
    loss_BT: float32, cross-entropy in nats.
    correct_BT: bool, no token has a larger logit than the target.
    preferred_BT: bool, the target is more probable than what the batch has in its place as
      `alternatives`; None where there are none.
  """

  loss_BT: jax.Array
  correct_BT: jax.Array
  preferred_BT: jax.Array | None


class Stopped(Exception):
  """An evaluation was asked to stop between two batches."""


# Name -> (sum_B, weight_B) of each row; the metric is the sums' total over the weights'.
Sums = dict[str, tuple[jax.Array, jax.Array]]
Metrics = Callable[[Scores, Batch], Sums]


@configurable
def language_model(scores: Scores, batch: Batch) -> Sums:
  """The metrics of Pax's language models, over the tokens that have weight.

  `log_pplx` is the mean cross-entropy in nats; `fraction_of_correct_next_step_preds` the share of
  tokens with the largest logit.
  """
  weights_BT = batch["weights"]
  weight_B = weights_BT.sum(-1)
  return {
    "log_pplx": ((scores.loss_BT * weights_BT).sum(-1), weight_B),
    "fraction_of_correct_next_step_preds": ((scores.correct_BT * weights_BT).sum(-1), weight_B),
  }


@configurable
def acc_strict(scores: Scores, batch: Batch) -> Sums:
  """LAMBADA's: the share of examples whose every target token has the largest logit."""
  return {"acc_strict": _share_of_examples(scores.correct_BT, batch)}


@configurable
def boolq_acc(scores: Scores, batch: Batch) -> Sums:
  """BoolQ's: the share of examples whose answer is more probable than the other one."""
  assert scores.preferred_BT is not None, "the data have no alternatives"
  return {"boolq_acc": _share_of_examples(scores.preferred_BT, batch)}


@configurable
def preference_acc(scores: Scores, batch: Batch) -> Sums:
  """The share of rows whose segment 1, the preferred answer, is more probable than segment 2."""
  answers = [batch["weights"] * (batch["segments"] == part) for part in (1, 2)]
  chosen_B, rejected_B = ((scores.loss_BT * answer_BT).sum(-1) for answer_BT in answers)
  is_pair_B = (answers[0].any(-1) & answers[1].any(-1)).astype(jnp.float32)
  return {"preference_acc": ((chosen_B < rejected_B) * is_pair_B, is_pair_B)}


def _share_of_examples(right_BT: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
  is_target_BT = batch["weights"] > 0
  counts_B = is_target_BT.any(-1)
  right_B = (right_BT | ~is_target_BT).all(-1) & counts_B
  return right_B.astype(jnp.float32), counts_B.astype(jnp.float32)


def score(logits: jax.Array, targets: jax.Array, alternatives: jax.Array | None) -> Scores:
  """Returns what logits [..., V] say of targets [...]; of equal logits the first is the largest."""
  loss = cross_entropy(logits, targets)
  preferred = None if alternatives is None else loss < cross_entropy(logits, alternatives)
  return Scores(loss, logits.argmax(-1) == targets, preferred)


def scores_of(definition: Definition, params: Params, batch: Batch) -> Scores:
  """Returns what a model says of a batch; only a part of its logits exists at a time."""
  model = definition.bind(params)
  x_BTD, _, _ = model.hidden(batch["inputs"], context_of(batch))
  arrays = (batch["targets"], batch.get("alternatives"))
  return model.map_logits(lambda logits_BTV, arrays: score(logits_BTV, *arrays), x_BTD, arrays)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSet:
  """One data set to evaluate on.

  Attributes:
    dataset: The data.
    metrics: What is computed of each batch.
    num_batches: At most so many; None: all. Data that never end must be given a number.
  """

  dataset: Dataset
  metrics: tuple[Metrics, ...] = (language_model,)
  num_batches: ranges.Positive | None = None

  @property
  def names(self) -> list[str]:
    """The names of its metrics."""
    numbers, truth = jnp.zeros((1, 1)), jnp.zeros((1, 1), bool)
    names = ("inputs", "targets", "alternatives", "segments", "positions")
    batch = dict.fromkeys(names, numbers.astype(jnp.int32)) | {"weights": numbers}
    given = Scores(numbers, truth, truth), batch
    return [name for metrics in self.metrics for name in jax.eval_shape(metrics, *given)]


@dataclasses.dataclass(frozen=True)
class Result:
  """What an evaluation found.

  Attributes:
    values: Each metric, its standard error as `<metric>_stderr` if there are two rows or more, and
      as `num_predictions` and `num_examples` the numbers of weighted tokens and of rows with any.
    records: Of each row, the number that its data set gave it and its metrics; empty if it gave
      none.
  """

  values: dict[str, float]
  records: list[dict[str, float]]


class Evaluator:
  """Computes the metrics of one eval set, with compiled programs for all its passes."""

  def __init__(
    self,
    definition: Definition,
    eval_set: EvalSet,
    feed: Feed,
    *,
    batch_size: int,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """Evaluates in batches of `batch_size`, which `feed` brings onto the devices.

    `compiler_options` are XLA's.
    """
    self._eval_set = eval_set
    self._feed = feed
    self._batch_size = batch_size
    self._is_compiled = False

    def measure(params: Params, batch: Batch) -> Sums:
      scores = scores_of(definition, definition.prepare(params), batch)
      weight_B = batch["weights"].sum(-1)
      sums: Sums = {"num_predictions": (weight_B, weight_B)}
      for metrics in eval_set.metrics:
        sums |= metrics(scores, batch)
      # Every host reads all rows.
      return jax.lax.with_sharding_constraint(sums, PartitionSpec())

    self._measure = jax.jit(measure, compiler_options=dict(compiler_options or {}))

  def run(
    self, params: Params, *, name: str = "", stops: Callable[[], bool] = lambda: False
  ) -> Result:
    """Returns every metric over one pass.

    Args:
      params: The weights.
      name: That of the set, for who watches it.
      stops: Asked after each batch whether to stop.

    Raises:
      Stopped: `stops` said so.
    """
    measured = list(self._measured(params, name, stops))
    if not measured:
      raise ValueError("an evaluation set without a batch")
    batches, numbers = zip(*measured, strict=True)
    sums = jax.tree.map(
      lambda *parts: np.concatenate(parts).astype(np.float64), *jax.device_get(batches)
    )
    return result(sums, None if numbers[0] is None else np.concatenate(numbers))

  def _measured(
    self, params: Params, name: str, stops: Callable[[], bool]
  ) -> Iterator[tuple[Sums, np.ndarray | None]]:
    dataset = self._eval_set.dataset
    in_flight: collections.deque[Sums] = collections.deque()
    progress.enter("eval", f"{name}, batch 0")
    with dataset.batches(self._batch_size, rows=self._feed.rows, repeat=False) as batches:
      for index, batch in enumerate(batches):
        if index == self._eval_set.num_batches:
          break
        if not self._is_compiled:
          progress.enter("eval_compile", name)
        sums = self._measure(params, self._feed.put(batch.arrays))
        self._is_compiled = True
        progress.enter("eval", f"{name}, batch {index}")
        in_flight.append(sums)
        if len(in_flight) > self._feed.steps_in_flight:
          jax.block_until_ready(in_flight.popleft())
        yield sums, batch.numbers
        if stops():
          raise Stopped


def result(sums: dict[str, tuple[np.ndarray, np.ndarray]], numbers: np.ndarray | None) -> Result:
  """Returns what float64 sums [rows] and weights [rows], and the rows' numbers, come to."""
  weight_B, _ = sums.pop("num_predictions")
  real_B = weight_B > 0
  values: dict[str, float] = {}
  for name, (sum_B, weights_B) in sums.items():
    total = max(weights_B.sum(), 1e-9)
    values[name] = float(sum_B.sum() / total)
    if (count := np.count_nonzero(weights_B)) > 1:
      # Of a quotient of sums; where all weights are 1, the sample's standard error.
      deviations_B = sum_B - values[name] * weights_B
      error = np.sqrt((deviations_B**2).sum() * count / (count - 1)) / total
      values[f"{name}_stderr"] = float(error)
  values |= {"num_predictions": float(weight_B.sum()), "num_examples": float(real_B.sum())}
  if numbers is None:
    return Result(values, [])
  records = [
    {"example": int(numbers[row])}
    | {name: float(of[row] / max(by[row], 1e-9)) for name, (of, by) in sums.items()}
    | {"num_predictions": float(weight_B[row])}
    for row in np.argsort(numbers, kind="stable")
    if numbers[row] >= 0
  ]
  return Result(values, records)
