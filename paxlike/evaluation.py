# SPDX-License-Identifier: Apache-2.0
"""Evaluation: data sets, the metrics computed on them, and the pass that joins the two."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxlike.feed import Feed
from paxlike.layers.decoder import Batch, forward
from paxlike.layers.loss import cross_entropy
from paxlike.layers.module import Definition, Params

# Name -> (sum, weight); the metric is their quotient over the whole set.
Sums = dict[str, tuple[jax.Array, jax.Array]]


def language_model(logits_BTV: jax.Array, batch: Batch) -> Sums:
  """The metrics of Pax's language models, over the tokens that have weight.

  `log_pplx` is the mean cross-entropy in nats; `fraction_of_correct_next_step_preds` the share of
  tokens with the largest logit.
  """
  weights_BT = batch["weights"]
  weight = weights_BT.sum()
  losses_BT = cross_entropy(logits_BTV, batch["targets"])
  correct_BT = logits_BTV.argmax(-1) == batch["targets"]
  return {
    "log_pplx": ((losses_BT * weights_BT).sum(), weight),
    "fraction_of_correct_next_step_preds": ((correct_BT * weights_BT).sum(), weight),
  }


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSet:
  """One data set to evaluate on.

  Attributes:
    dataset: A `data.dataset.Dataset`.
    metrics: What is computed of each batch.
    num_batches: At most so many; None: all.
  """

  dataset: Any
  metrics: Callable[[jax.Array, Batch], Sums] = language_model
  num_batches: int | None = None


class Evaluator:
  """Computes the metrics of one eval set, with one compiled program for all its passes."""

  def __init__(self, definition: Definition, eval_set: EvalSet, feed: Feed, *, batch_size: int):
    """Evaluates in batches of `batch_size`, which `feed` brings onto the devices."""
    self._eval_set = eval_set
    self._feed = feed
    self._batch_size = batch_size

    def measure(params: Params, batch: Batch) -> Sums:
      logits_BTV, _ = forward(definition, definition.prepare(params), batch)
      count = (batch["weights"].sum(), jnp.ones(()))
      return eval_set.metrics(logits_BTV, batch) | {"num_predictions": count}

    self._measure = jax.jit(measure)

  def run(self, params: Params) -> dict[str, float]:
    """Returns every metric over one pass; `num_predictions` is the number of weighted tokens."""
    sums: Sums | None = None
    dataset = self._eval_set.dataset
    with dataset.batches(self._batch_size, rows=self._feed.rows, repeat=False) as batches:
      for index, batch in enumerate(batches):
        if index == self._eval_set.num_batches:
          break
        new = self._measure(params, self._feed.put(batch.arrays))
        sums = new if sums is None else jax.tree.map(jnp.add, sums, new)
        if self._feed.steps_in_flight == 0:
          jax.block_until_ready(sums)
    if sums is None:
      raise ValueError("an evaluation set without a batch")
    host = jax.device_get(sums)
    num_predictions = float(host.pop("num_predictions")[0])
    values = {name: float(total / max(weight, 1e-9)) for name, (total, weight) in host.items()}
    return values | {"num_predictions": num_predictions}
