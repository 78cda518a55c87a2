# SPDX-License-Identifier: Apache-2.0
"""Evaluation: eval sets, their metrics, and the pass that computes them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import Dataset
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.loss import cross_entropy
from paxlike.layers.module import Definition, Params
from paxlike.layers.reward_model import RewardModel
from paxlike.processes import phases


class Scores(NamedTuple):
  """A model's scores of the targets of a batch, all [B, T].

  Attributes:
    loss_BT: float32, cross-entropy in nats; of a reward model, minus the rewards.
    correct_BT: bool, the target has the largest logit.
    preferred_BT: bool, the target is more probable than the token of `alternatives` at the same
      position; None without alternatives.
  """

  loss_BT: jax.Array
  correct_BT: jax.Array
  preferred_BT: jax.Array | None


class Stopped(Exception):
  """An evaluation was asked to stop between two batches."""


# Name -> (sum_B, weight_B) per sequence; the metric is sum_B.sum() / weight_B.sum().
Sums = dict[str, tuple[jax.Array, jax.Array]]
Metrics = Callable[[Scores, Batch], Sums]


@configurable
def language_model(scores: Scores, batch: Batch) -> Sums:
  """Pax's metrics of language models, over tokens weighted by `weights`.

  `log_pplx` is the mean cross-entropy in nats, `fraction_of_correct_next_step_preds` the fraction
  of targets with the largest logit. `bits_per_byte`, if the batch has `bytes`, is the sum of the
  cross-entropies in bits over the bytes of the targets' text, which compares models of different
  tokenizers; targets that stand for no text, such as EOS, do not count in it.
  """
  weights_BT = batch["weights"]
  weight_B = weights_BT.sum(-1)
  of_text = {}
  if "bytes" in batch:
    bits_BT = scores.loss_BT * weights_BT * (batch["bytes"] > 0) / math.log(2)
    of_text["bits_per_byte"] = (bits_BT.sum(-1), (batch["bytes"] * weights_BT).sum(-1))
  return {
    "log_pplx": ((scores.loss_BT * weights_BT).sum(-1), weight_B),
    "fraction_of_correct_next_step_preds": ((scores.correct_BT * weights_BT).sum(-1), weight_B),
    **of_text,
  }


@configurable
def acc_strict(scores: Scores, batch: Batch) -> Sums:
  """LAMBADA accuracy: the fraction of examples whose targets all have the largest logit."""
  return {"acc_strict": _share_of_examples(scores.correct_BT, batch)}


@configurable
def boolq_acc(scores: Scores, batch: Batch) -> Sums:
  """BoolQ accuracy: the fraction of examples whose answer is more probable than the other one."""
  assert scores.preferred_BT is not None, "the data have no alternatives"
  return {"boolq_acc": _share_of_examples(scores.preferred_BT, batch)}


@configurable
def preference_acc(scores: Scores, batch: Batch) -> Sums:
  """Fraction of sequences whose segment 1, the preferred answer, is likelier than segment 2.

  For a reward model: the fraction whose segment 1 has the larger reward.
  """
  answers = [batch["weights"] * (batch["segments"] == part) for part in (1, 2)]
  chosen_B, rejected_B = ((scores.loss_BT * answer_BT).sum(-1) for answer_BT in answers)
  is_pair_B = (answers[0].any(-1) & answers[1].any(-1)).astype(jnp.float32)
  return {"preference_acc": ((chosen_B < rejected_B) * is_pair_B, is_pair_B)}


@configurable
def labeled_pplx(scores: Scores, batch: Batch) -> Sums:
  """Mean cross-entropies in nats of desirable answers, segment 1, and of undesirable ones."""
  weights_BT2 = batch["weights"][..., None] * (batch["segments"][..., None] == jnp.array([1, 2]))
  losses_B2 = (scores.loss_BT[..., None] * weights_BT2).sum(1)
  weights_B2 = weights_BT2.sum(1)
  names = ("desirable_log_pplx", "undesirable_log_pplx")
  return {name: (losses_B2[:, n], weights_B2[:, n]) for n, name in enumerate(names)}


def _share_of_examples(right_BT: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
  is_target_BT = batch["weights"] > 0
  counts_B = is_target_BT.any(-1)
  right_B = (right_BT | ~is_target_BT).all(-1) & counts_B
  return right_B.astype(jnp.float32), counts_B.astype(jnp.float32)


def score(logits: jax.Array, targets: jax.Array, alternatives: jax.Array | None) -> Scores:
  """Returns the scores of targets [...] by logits [..., V]; ties go to the first token."""
  loss = cross_entropy(logits, targets)
  preferred = None if alternatives is None else loss < cross_entropy(logits, alternatives)
  return Scores(loss, logits.argmax(-1) == targets, preferred)


def scores_of(definition: Definition, params: Params, batch: Batch) -> Scores:
  """Returns the scores of a batch; only a chunk of the logits is in memory at a time."""
  model = definition.bind(params)
  x_BTD, _, _ = model.hidden(batch["inputs"], context_of(batch))
  if isinstance(model, RewardModel):
    loss_BT = -model.rewards(x_BTD)
    return Scores(loss_BT, jnp.zeros_like(loss_BT, bool), None)
  arrays = (batch["targets"], batch.get("alternatives"))
  return model.map_logits(lambda logits_BTV, arrays: score(logits_BTV, *arrays), x_BTD, arrays)


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSet:
  """One data set to evaluate on.

  Attributes:
    dataset: The data.
    metrics: Functions that compute the metrics of a batch.
    num_batches: Maximum number of batches; None: all. Required for endless data.
  """

  dataset: Dataset
  metrics: tuple[Metrics, ...] = (language_model,)
  num_batches: ranges.Positive | None = None

  @functools.cached_property
  def byte_lengths(self) -> np.ndarray | None:
    """`Tokenizer.byte_lengths` of its tokenizer; None if there is none. Reads its file."""
    tokenizer = self.dataset.tokenizer
    return None if tokenizer is None else tokenizer.byte_lengths()

  def with_bytes(self, batch: Batch) -> Batch:
    """Returns a batch with `bytes` [B, T], int32, of its targets, if the data tell."""
    if (lengths := self.byte_lengths) is None:
      return batch
    options: Any = {"mode": "fill", "fill_value": 0}  # The model may have more ids.
    return {**batch, "bytes": jnp.asarray(lengths).at[batch["targets"]].get(**options)}

  @property
  def names(self) -> list[str]:
    """Names of the metrics."""
    numbers, truth = jnp.zeros((1, 1)), jnp.zeros((1, 1), bool)
    names = ("inputs", "targets", "alternatives", "segments", "positions")
    batch = dict.fromkeys(names, numbers.astype(jnp.int32)) | {"weights": numbers}
    given = Scores(numbers, truth, truth), self.with_bytes(batch)
    return [name for metrics in self.metrics for name in jax.eval_shape(metrics, *given)]


@dataclasses.dataclass(frozen=True)
class Result:
  """The result of an evaluation.

  Attributes:
    values: Each metric; its standard error, `<metric>_stderr`, if there are at least two sequences;
      and the numbers of weighted tokens, `num_predictions`, and of sequences with any,
      `num_examples`.
    records: The number of each sequence in its data set, with its metrics; empty if the data set
      does not number them.
  """

  values: dict[str, float]
  records: list[dict[str, float]]


class Evaluator:
  """Computes the metrics of one eval set, with one compiled program for all passes."""

  def __init__(
    self,
    definition: Definition,
    eval_set: EvalSet,
    placer: BatchPlacer,
    *,
    batch_size: int,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """`placer` places batches of `batch_size` sequences on the devices.

    `compiler_options` are XLA's.
    """
    self._eval_set = eval_set
    self._placer = placer
    self._batch_size = batch_size
    self._is_compiled = False

    def measure(params: Params, batch: Batch) -> Sums:
      scores = scores_of(definition, definition.prepare(params), batch)
      weight_B = batch["weights"].sum(-1)
      batch = eval_set.with_bytes(batch)
      sums: Sums = {"num_predictions": (weight_B, weight_B)}
      for metrics in eval_set.metrics:
        sums |= metrics(scores, batch)
      # Replicated, because every host reads all sequences.
      return jax.lax.with_sharding_constraint(sums, PartitionSpec())

    self._measure = jax.jit(measure, compiler_options=dict(compiler_options or {}))

  def run(
    self, params: Params, *, name: str = "", stops: Callable[[], bool] = lambda: False
  ) -> Result:
    """Returns the metrics of one pass.

    Args:
      params: The weights.
      name: Name of the eval set, for progress reports.
      stops: Called after each batch; returns whether to stop.

    Raises:
      Stopped: `stops` returned true.
    """
    measured = list(self._measured(params, name, stops))
    if not measured:
      raise ValueError("the eval set has no batches")
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
    phases.enter("eval", f"{name}, batch 0")
    with dataset.batches(self._batch_size, rows=self._placer.rows, repeat=False) as batches:
      for index, batch in enumerate(batches):
        if index == self._eval_set.num_batches:
          break
        if not self._is_compiled:
          phases.enter("eval_compile", name)
        sums = self._measure(params, self._placer.put(batch.arrays))
        self._is_compiled = True
        phases.enter("eval", f"{name}, batch {index}")
        in_flight.append(sums)
        if len(in_flight) > self._placer.steps_in_flight:
          jax.block_until_ready(in_flight.popleft())
        yield sums, batch.numbers
        if stops():
          raise Stopped


def result(sums: dict[str, tuple[np.ndarray, np.ndarray]], numbers: np.ndarray | None) -> Result:
  """Returns the result for float64 (sum_B, weight_B) by metric, and the sequences' numbers."""
  weight_B, _ = sums.pop("num_predictions")
  real_B = weight_B > 0
  values: dict[str, float] = {}
  for name, (sum_B, weights_B) in sums.items():
    total = max(weights_B.sum(), 1e-9)
    values[name] = float(sum_B.sum() / total)
    if (count := np.count_nonzero(weights_B)) > 1:
      # Standard error of a ratio of sums; of the sample mean if all weights are 1.
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
