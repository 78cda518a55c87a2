# SPDX-License-Identifier: Apache-2.0
"""Steps of reinforcement learning: sample, reward, update."""

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.data.tuning.prompts import Prompts
from paxlike.inference.generate import STEPS_PER_CALL
from paxlike.layers import aux_losses
from paxlike.layers.decoder import Batch
from paxlike.processes import phases
from paxlike.rewards.pool import RewardPool
from paxlike.training.forward_backward import ForwardBackward
from paxlike.training.gradients import Constants, Differentiated, Microbatch
from paxlike.training.objectives import shares_base, without_adapters
from paxlike.training.reinforcement.answers import Answer, Packed, decoded
from paxlike.training.reinforcement.drafts import Drafter
from paxlike.training.reinforcement.sampler import Sampler
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import Metrics, gradients_of

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer

Prepared = tuple[Differentiated, Constants]


class PolicyTraining:
  """Takes the steps of a run; a context that ends its worker processes."""

  def __init__(self, trainer: "Trainer"):
    """Compiles nothing, and starts no process, yet."""
    assert trainer.rollouts is not None
    self._trainer = trainer
    self._how = how = trainer.rollouts
    self._objective: Any = trainer.objective
    self._data: Prompts = trainer.data
    options: Any = {"compiler_options": dict(trainer.execution.compiler_options)}
    self._passes = ForwardBackward(
      trainer.definition, trainer.optimizer, sampling=self._objective.sampling, **options
    )
    self._rewards, self._loss = None, None
    if how.reward is not None:
      self._loss = jax.jit(jax.value_and_grad(self._objective.loss, has_aux=True), **options)
      self._rewards = RewardPool(
        how.reward, num_workers=how.reward_workers, seconds=how.reward_seconds
      )
    self._sampler: Sampler | None = None
    self._is_compiled = False

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    if self._rewards is not None:
      self._rewards.__exit__()

  def __call__(
    self, state: TrainState, prompts: Mapping[str, np.ndarray]
  ) -> tuple[TrainState, Metrics]:
    """Takes a step: answers `prompts`, a batch of `Prompts`, and updates the state with them."""
    sampler = self._sampler_of(state)
    prepared = self._passes.prepare(state)
    given = self._empty_answers(prompts, step=int(state.step))
    answers, packed, metrics = self._rollout(sampler, prepared, given)
    if self._objective.sampling.temperature != 1:
      del metrics["draft_gap"]  # The decoder's log-probabilities are those before temperature.
    arrays = self._training_arrays(packed, answers)
    if self._objective.beta:
      reference = self._reference(state, prepared)
      for batch, of_batch in zip(packed.batches, arrays, strict=True):
        scores = sampler.score(reference, batch).scores
        of_batch["reference_log_probabilities"] = scores.log_probabilities_BT
    count, of_updates = self._how.num_updates, {}
    for number in range(count):
      prepared = prepared if number == 0 else self._passes.prepare(state)
      is_last = number == count - 1
      state, found, of_update = self._update(state, prepared, packed, arrays, is_last=is_last)
      of_updates = _added(of_updates, of_update)
      if number == 0:
        metrics["log_probability_gap"] = _gap(packed.collect(found), answers)
    return state, metrics | of_updates

  def _rollout(
    self, sampler: Sampler, prepared: Prepared, given: Sequence[Answer]
  ) -> tuple[list[Answer], Packed, Metrics]:
    """Samples and rewards empty answers, in place, until there are enough to train on.

    Returns:
      Those to train on, as they are and as batches, and metrics of all that were sampled.
    """
    how = self._how
    left = [list(given[at : at + how.group_size]) for at in range(0, len(given), how.group_size)]
    num_given, kept, metrics = len(left), [], {}
    while True:
      now, left = left[: how.num_prompts - len(kept)], left[how.num_prompts - len(kept) :]
      answers = [answer for group in now for answer in group]
      packed, of_samples = _sampled(sampler, prepared, answers)
      metrics = _added(metrics, of_samples | self._rewarded(answers))
      if how.most_prompts is None:
        return answers, packed, metrics
      kept += [group for group in now if len({answer.reward for answer in group}) > 1]
      if len(kept) == how.num_prompts or not left:
        break
    metrics["prompts_tried"] = _scalar(num_given - len(left)), _scalar(1)
    answers = [answer for group in kept or now for answer in group]
    packed, _ = sampler.sample(prepared, answers)  # Which only checks them, in the new batches.
    if sampler.redrawn:
      self._rewarded(answers)
    return answers, packed, metrics

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

  def _rewarded(self, answers: Sequence[Answer]) -> Metrics:
    """Sets the rewards and advantages of answers."""
    phases.enter("reward")
    assert self._rewards is not None
    how, found = self._how, self._rewards(decoded(answers, self._data))
    for answer, one in zip(answers, found, strict=True):
      answer.reward = one.total
    rewards_PG = np.array([one.total for one in found]).reshape(-1, how.group_size)
    for answer, advantage in zip(answers, how.advantages(rewards_PG).reshape(-1), strict=True):
      answer.advantage = float(advantage)
    metrics = {
      "reward": _mean(rewards_PG),
      "equal_groups_fraction": _mean(np.ptp(rewards_PG, axis=1) == 0),
      "reward_timeouts": (_scalar(sum(one.timed_out for one in found)), _scalar(1)),
    }
    names = sorted({name for one in found for name in one.parts} - {"reward"})
    parts = {f"reward/{n}": _mean([one.parts.get(n, 0.0) for one in found]) for n in names}
    return metrics | parts

  def _training_arrays(self, packed: Packed, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Returns the arrays of each batch that the loss needs."""
    how = self._how
    trained = np.array([answer.has_ended or not how.mask_truncated for answer in answers])
    sizes = np.array([len(answer.tokens) for answer in answers]) * trained
    weights = how.normalization(sizes, how.max_new_tokens) * trained
    parts = {
      "weights": weights,
      "advantages": [answer.advantage for answer in answers],
      "old_log_probabilities": [answer.log_probabilities for answer in answers],
    }
    spread = {name: packed.spread(values) for name, values in parts.items()}
    placer = self._trainer.placer
    return [
      placer.put({name: arrays[number] for name, arrays in spread.items()})
      for number in range(len(packed.batches))
    ]

  def _reference(self, state: TrainState, prepared: Prepared) -> Prepared:
    """Returns the weights of the reference model."""
    weights, constants = prepared
    if shares_base(self._trainer.definition):
      trained = without_adapters(weights.trained)
    else:
      trained = {name: state.reference[name] for name in weights.trained}
    operands = self._trainer.definition.quantize_operands(trained | constants.frozen)
    return weights._replace(trained=trained), constants._replace(operands=operands)

  def _update(
    self,
    state: TrainState,
    prepared: Prepared,
    packed: Packed,
    arrays: Sequence[Batch],
    *,
    is_last: bool,
  ) -> tuple[TrainState, list[np.ndarray], Metrics]:
    """Returns (the state after an update, the log-probabilities of each batch, metrics)."""
    phases.enter("step" if self._is_compiled else "compile", int(state.step))
    batches = [self._trainer.placer.put(batch) for batch in packed.batches]
    assert self._loss is not None
    step = self._passes.gradients(prepared, batches, arrays, self._loss)
    found = [np.asarray(of_batch) for of_batch in step.log_probabilities]
    state, of_update = self._passes.update(state, step.total, step.loss, is_last=is_last)
    self._is_compiled = True
    num_tokens = _scalar(sum(place.end - place.first for place in packed.places))
    metrics = {
      "loss": (step.loss * num_tokens, num_tokens),
      **{name: (pair[0], pair[1]) for name, pair in (step.sums | step.aux.metrics).items()},
      **{name: (value, _scalar(len(arrays))) for name, value in step.aux.losses.items()},
      **{name: (value, _scalar(1)) for name, value in of_update.items()},
    }
    return state, found, metrics

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


class DistillationTraining(PolicyTraining):
  """Takes the steps of on-policy distillation: sample, compare with the teacher, update."""

  def __call__(
    self, state: TrainState, prompts: Mapping[str, np.ndarray]
  ) -> tuple[TrainState, Metrics]:
    """Takes a step: answers `prompts`, a batch of `Prompts`, and updates the state with them."""
    prepared = self._passes.prepare(state)
    answers = self._empty_answers(prompts, step=int(state.step))
    packed, metrics = _sampled(self._sampler_of(state), prepared, answers)
    if self._objective.sampling.temperature != 1:
      del metrics["draft_gap"]
    kept = [float(answer.has_ended or not self._how.mask_truncated) for answer in answers]
    weights, total, losses = packed.spread(kept), None, aux_losses.none()
    num_tokens = _scalar(max(sum(map(np.sum, weights)), 1))
    phases.enter("step" if self._is_compiled else "compile", int(state.step))
    for of_tokens, batch in zip(weights, packed.batches, strict=True):
      arrays = self._trainer.placer.put(batch | {"weights": of_tokens})
      part, aux = self._gradients(prepared, arrays, num_tokens, _scalar(len(weights)))
      total, losses = self._passes.accumulate(total, part), aux_losses.add(losses, aux)
    assert total is not None
    state, of_update = self._passes.update(state, total, losses.losses["loss"])
    self._is_compiled = True
    metrics |= {name: (value * num_tokens, num_tokens) for name, value in losses.losses.items()}
    metrics |= {name: (pair[0], pair[1]) for name, pair in losses.metrics.items()}
    return state, metrics | {name: (value, _scalar(1)) for name, value in of_update.items()}

  @functools.cached_property
  def _gradients(self) -> Any:
    """Returns (float32 gradients, Aux) of a batch, given the tokens and batches of the step."""
    of_batch = gradients_of(self._trainer.definition, self._objective)

    def gradients(prepared: Prepared, batch: Batch, num_tokens: jax.Array, count: Any) -> Any:
      part = Microbatch(batch, 0, count, num_tokens, jax.random.key(0))  # There is no dropout.
      return jax.tree.map(lambda x: x.astype(jnp.float32), of_batch(*prepared, part))

    return jax.jit(gradients, compiler_options=dict(self._trainer.execution.compiler_options))


def _sampled(
  sampler: Sampler, prepared: Prepared, answers: Sequence[Answer]
) -> tuple[Packed, Metrics]:
  """Samples empty answers, in place; returns them as batches, and metrics."""
  began = time.perf_counter()
  packed, results = sampler.sample(prepared, answers)
  seconds = time.perf_counter() - began
  sizes = [len(answer.tokens) for answer in answers]
  drafted = np.concatenate([answer.drafted for answer in answers])
  gaps = np.abs(drafted - np.concatenate([answer.log_probabilities for answer in answers]))
  entropies = packed.collect([np.asarray(result.scores.entropies_BT) for result in results])
  return packed, {
    "entropy": _mean(np.concatenate(entropies)),
    "answer_tokens": _mean(sizes),
    "truncated_fraction": _mean([not answer.has_ended for answer in answers]),
    "draft_gap": _mean(gaps[np.isfinite(gaps)]),
    "redrawn_fraction": (_scalar(sampler.redrawn), _scalar(sum(sizes))),
    "unsettled_fraction": (_scalar(sampler.unsettled), _scalar(len(answers))),
    "sampled_tokens_per_second": (_scalar(sum(sizes)), _scalar(seconds)),
  }


def _added(some: Metrics, more: Metrics) -> Metrics:
  """Returns the sums of metrics; what one of them lacks is zero."""
  added = {n: (some[n][0] + pair[0], some[n][1] + pair[1]) for n, pair in more.items() if n in some}
  return some | more | added


def _gap(found: Sequence[np.ndarray], answers: Sequence[Answer]) -> tuple[jax.Array, jax.Array]:
  """Returns the largest difference to the log-probabilities with which answers were accepted."""
  pairs = zip(found, answers, strict=True)
  gaps = [np.abs(one - answer.log_probabilities).max() for one, answer in pairs]
  return _scalar(max(gaps)), _scalar(1)


def _scalar(value: Any) -> jax.Array:
  return jnp.asarray(value, jnp.float32)


def _mean(values: Any) -> tuple[jax.Array, jax.Array]:
  array = np.asarray(values, np.float64)
  return _scalar(array.sum()), _scalar(array.size)
