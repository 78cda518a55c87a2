# SPDX-License-Identifier: Apache-2.0
"""What all steps that train on answers of the model have in common: they sample them first."""

import abc
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from etils import epath

from paxlike.data.tuning.prompts import Prompts
from paxlike.inference.generate import STEPS_PER_CALL
from paxlike.processes.host_collectives import fetched
from paxlike.training.forward_backward import ForwardBackward
from paxlike.training.gradients import Constants, Differentiated
from paxlike.training.reinforcement.answers import Answer, Packed
from paxlike.training.reinforcement.drafts import Drafter
from paxlike.training.reinforcement.sampler import Sampler
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import Metrics

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer

Prepared = tuple[Differentiated, Constants]
# Batches of `Prompts` for a step and, if `is_behind`, for the next one.
StepPrompts = tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray] | None]


class RolloutTraining(abc.ABC):
  """Takes the steps of a run; a context that ends its worker processes."""

  def __init__(self, trainer: "Trainer"):
    """Compiles nothing yet."""
    assert trainer.rollouts is not None
    self._trainer = trainer
    self._how = trainer.rollouts
    self._objective: Any = trainer.objective
    self._data: Prompts = trainer.data
    self._options: Any = {"compiler_options": dict(trainer.execution.compiler_options)}
    self._passes = ForwardBackward(
      trainer.definition, trainer.optimizer, sampling=self._objective.sampling, **self._options
    )
    self._sampler: Sampler | None = None
    self._is_compiled = False

  @abc.abstractmethod
  def __call__(self, state: TrainState, given: StepPrompts) -> tuple[TrainState, Metrics]:
    """Takes a step: answers prompts, and updates the state with the answers."""

  @property
  def is_behind(self) -> bool:
    """Whether a step samples the answers of the next one before its own update."""
    return False

  def saved(self) -> dict[str, Any]:
    """Returns JSON of the answers of the next step, for a checkpoint; {} if there are none."""
    return {}

  def restore(self, saved: Mapping[str, Any]):
    """Goes on with what `saved` returned, as part of the state of the data."""
    del saved

  def load(self, run: epath.Path | None) -> dict[str, str]:
    """Loads other models of the run; returns their records for its folder, by name.

    `run` is the folder that has those of the steps so far; None: there are none.
    """
    del run
    return {}

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    del unused

  def _empty_answers(self, prompts: Mapping[str, np.ndarray], *, step: int) -> list[Answer]:
    """Returns the answers to sample, those to the same prompt beside each other."""
    count = len(prompts["prompts"]) * self._how.group_size
    entropy = [self._trainer.seed % 2**64, step]
    seeds = np.random.default_rng(entropy).integers(2**31, size=count).tolist()
    return [
      Answer(
        prompt=row[row >= 0],
        record=int(record),
        seed=seeds.pop(),
        max_tokens=self._how.max_new_tokens,
      )
      for row, (record,) in zip(prompts["prompts"], prompts["records"], strict=True)
      for _ in range(self._how.group_size)
    ]

  def _sampler_of(self, state: TrainState) -> Sampler:
    if self._sampler is not None:
      return self._sampler
    trainer, how, data = self._trainer, self._how, self._data
    drafter = Drafter(
      trainer.definition,
      state.weights,
      num_slots=min(how.num_slots, how.num_prompts * how.group_size),
      seq_len=data.seq_len,
      end_ids=data.end_ids,
      steps_per_call=min(STEPS_PER_CALL, how.max_new_tokens),
      sampling=self._objective.sampling,
      phase="sample",
      compiler_options=trainer.execution.compiler_options,
    )
    self._sampler = Sampler(drafter, self._passes, trainer.placer, seq_len=data.seq_len)
    return self._sampler

  def _sampled(
    self, sampler: Sampler, prepared: Prepared, answers: Sequence[Answer]
  ) -> tuple[Packed, Metrics]:
    """Samples empty answers, in place; returns them as batches, and metrics."""
    began = time.perf_counter()
    packed, results = sampler.sample(prepared, answers)
    seconds = time.perf_counter() - began
    sizes = [len(answer.tokens) for answer in answers]
    entropies = packed.collect(fetched([result.scores.entropies_BT for result in results]))
    metrics = {
      "entropy": mean(np.concatenate(entropies)),
      "answer_tokens": mean(sizes),
      "truncated_fraction": mean([not answer.has_ended for answer in answers]),
      "redrawn_fraction": (scalar(sampler.redrawn), scalar(sum(sizes))),
      "unsettled_fraction": (scalar(sampler.unsettled), scalar(len(answers))),
      "sampled_tokens_per_second": (scalar(sum(sizes)), scalar(seconds)),
    }
    if self._objective.sampling.temperature == 1:  # The decoder's are those before temperature.
      drafted = np.concatenate([answer.drafted for answer in answers])
      gaps = np.abs(drafted - np.concatenate([answer.log_probabilities for answer in answers]))
      metrics["draft_gap"] = mean(gaps[np.isfinite(gaps)])
    return packed, metrics


def scalar(value: Any) -> Any:
  """Returns a number as metrics have them."""
  return np.float32(value)


def mean(values: Any) -> tuple[Any, Any]:
  """Returns the sum and the number of values."""
  array = np.asarray(values, np.float64)
  return scalar(array.sum()), scalar(array.size)
