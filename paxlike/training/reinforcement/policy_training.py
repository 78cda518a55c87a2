# SPDX-License-Identifier: Apache-2.0
"""Steps of reinforcement learning: sample, reward, update."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.data.tuning.prompts import Prompts
from paxlike.inference.generate import STEPS_PER_CALL
from paxlike.layers.decoder import Batch
from paxlike.processes import phases
from paxlike.processes.host_collectives import fetched
from paxlike.rewards.pool import Rewarded, RewardPool
from paxlike.training.forward_backward import ForwardBackward, differentiated
from paxlike.training.gradients import Constants, Differentiated
from paxlike.training.objectives import Grpo, shares_base, without_adapters
from paxlike.training.reinforcement import shared_rewards
from paxlike.training.reinforcement.answers import Answer, Packed, decoded, of_loss
from paxlike.training.reinforcement.drafts import Drafter
from paxlike.training.reinforcement.pending import Pending, importance, ratios
from paxlike.training.reinforcement.sampler import Sampler
from paxlike.training.reinforcement.values import Gae
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import Metrics

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer

Prepared = tuple[Differentiated, Constants]


class PolicyTraining:
  """Takes the steps of a run; a context that ends its worker processes."""

  def __init__(self, trainer: "Trainer"):
    """Compiles nothing, and starts no process, yet."""
    assert trainer.rollouts is not None and isinstance(trainer.objective, Grpo)
    self._trainer = trainer
    self._how = how = trainer.rollouts
    self._objective = trainer.objective
    self._data: Prompts = trainer.data
    options: Any = {"compiler_options": dict(trainer.execution.compiler_options)}
    self._passes = ForwardBackward(
      trainer.definition, trainer.optimizer, sampling=self._objective.sampling, **options
    )
    self._loss = differentiated(self._objective.loss, **options)
    self._rewards = RewardPool(
      how.reward, num_workers=how.reward_workers, seconds=how.reward_seconds
    )
    self._sampler: Sampler | None = None
    self._pending: Pending | None = None
    self._is_compiled = False

  @property
  def is_behind(self) -> bool:
    """Whether a step samples the answers of the next one before its own update."""
    return self._how.behind > 0

  def saved(self) -> dict[str, Any]:
    """Returns JSON of the answers of the next step, for a checkpoint; {} if there are none."""
    return {} if self._pending is None else {"answers": self._pending.saved()}

  def restore(self, saved: Mapping[str, Any]):
    """Goes on with what `saved` returned, as part of the state of the data."""
    if self.is_behind and "answers" in saved:
      self._pending = Pending.restored(saved["answers"])

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self._rewards.__exit__()

  def __call__(
    self, state: TrainState, given: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray] | None]
  ) -> tuple[TrainState, Metrics]:
    """Takes a step: answers prompts, and updates the state with the answers.

    `given` are batches of `Prompts` for this step and, if `is_behind`, for the next one.
    """
    (prompts, following), step = given, int(state.step)
    sampler = self._sampler_of(state)
    prepared = self._passes.prepare(state)
    if following is None:
      given_answers = self._empty_answers(prompts, step=step)
      answers, packed, metrics = self._rollout(sampler, prepared, given_answers)
    else:
      answers, packed, metrics = self._rollout_ahead(sampler, prepared, (prompts, following), step)
    if self._objective.sampling.temperature != 1:
      del metrics["draft_gap"]  # The decoder's log-probabilities are those before temperature.
    references = None
    if self._objective.beta:
      reference = self._reference(state, prepared)
      scored = [sampler.score(reference, batch).scores for batch in packed.batches]
      references = [scores.log_probabilities_BT for scores in scored]
    if isinstance(self._how.advantages, Gae):
      metrics |= self._with_values(self._how.advantages, packed, answers, references)
    arrays = self._training_arrays(packed, answers)
    if (cap := self._how.importance_cap) is not None:
      results = [sampler.score(prepared, batch) for batch in packed.batches]
      current = packed.collect(fetched([one.scores.log_probabilities_BT for one in results]))
      corrected, metrics["importance_capped_fraction"] = importance(current, answers, cap=cap)
      for of_batch, more in zip(arrays, self._placed(packed, corrected), strict=True):
        of_batch.update(more)
    if references is not None:
      for of_batch, reference_BT in zip(arrays, references, strict=True):
        of_batch["reference_log_probabilities"] = reference_BT
    count, of_updates = self._how.num_updates, {}
    for number in range(count):
      prepared = prepared if number == 0 else self._passes.prepare(state)
      is_last = number == count - 1
      state, found, of_update = self._update(state, prepared, packed, arrays, is_last=is_last)
      of_updates = _added(of_updates, of_update)
      if number == 0:
        metrics |= (ratios if self.is_behind else _gap)(packed.collect(found), answers)
    return state, jax.tree.map(jnp.asarray, metrics | of_updates)

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

  def _rollout_ahead(
    self,
    sampler: Sampler,
    prepared: Prepared,
    prompts: Sequence[Mapping[str, np.ndarray]],
    step: int,
  ) -> tuple[list[Answer], Packed, Metrics]:
    """Samples answers for the next step while those of this one are rewarded; see `_rollout`.

    `prompts` are those of this step, used if it is the first one, and of the next.
    """

    def sampled(number: int) -> Pending:
      answers = self._empty_answers(prompts[number], step=step + number)
      _, metrics = _sampled(sampler, prepared, answers)
      return Pending(answers=answers, sampled_at=step, metrics=metrics)

    def begin(pending: Pending):
      given = decoded(pending.answers, self._data)
      pending.rewards = shared_rewards.begin(self._rewards, given)

    now = self._pending or sampled(0)
    if now.rewards is None:
      begin(now)
    self._pending = ahead = sampled(1)
    assert now.rewards is not None
    metrics = dict(now.metrics) | self._set_rewards(now.answers, now.rewards())
    begin(ahead)  # They are computed during this step's update and the next step's sampling.
    staleness = (step - now.sampled_at) * self._how.num_updates
    metrics["staleness"] = _scalar(staleness), _scalar(1)
    return now.answers, sampler.packed(now.answers), metrics

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
    """Computes and sets the rewards and advantages of answers."""
    given = decoded(answers, self._data)
    return self._set_rewards(answers, shared_rewards.begin(self._rewards, given)())

  def _set_rewards(self, answers: Sequence[Answer], found: Sequence[Rewarded]) -> Metrics:
    how = self._how
    for answer, one in zip(answers, found, strict=True):
      answer.reward = one.total
    rewards_PG = np.array([one.total for one in found]).reshape(-1, how.group_size)
    if not isinstance(how.advantages, Gae):
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

  def _with_values(
    self,
    gae: Gae,
    packed: Packed,
    answers: Sequence[Answer],
    references: Sequence[jax.Array] | None,
  ) -> Metrics:
    """Sets the advantages and returns of answers, by their values; returns metrics."""
    objective, penalty = self._objective, {}
    if references is not None and not objective.penalizes:
      of_answers = packed.collect(fetched(references))
      penalty = {"beta": objective.beta, "references": of_answers}
    found = gae.set_advantages(answers, self._are_trained(answers), **penalty)
    return {name: (_scalar(total), _scalar(weight)) for name, (total, weight) in found.items()}

  def _are_trained(self, answers: Sequence[Answer]) -> np.ndarray:
    """Returns whether each answer has a loss."""
    return np.array([answer.has_ended or not self._how.mask_truncated for answer in answers])

  def _training_arrays(self, packed: Packed, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Returns the arrays of each batch that the loss needs."""
    how, trained = self._how, self._are_trained(answers)
    sizes = np.array([len(answer.tokens) for answer in answers]) * trained
    weights = how.normalization(sizes, how.max_new_tokens) * trained
    return self._placed(packed, of_loss(answers, weights))

  def _placed(self, packed: Packed, parts: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns the arrays of each batch, given the numbers of each answer."""
    spread = {name: packed.spread(values) for name, values in parts.items()}
    placer = self._trainer.placer
    return [
      placer.put_whole({name: arrays[number] for name, arrays in spread.items()})
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
    batches = [self._trainer.placer.put_whole(batch) for batch in packed.batches]
    step = self._passes.gradients(prepared, batches, arrays, self._loss)
    found = fetched(step.log_probabilities)
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
  entropies = packed.collect(fetched([result.scores.entropies_BT for result in results]))
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


def _gap(found: Sequence[np.ndarray], answers: Sequence[Answer]) -> Metrics:
  """Returns the largest difference to the log-probabilities with which answers were accepted."""
  pairs = zip(found, answers, strict=True)
  gaps = [np.abs(one - answer.log_probabilities).max() for one, answer in pairs]
  return {"log_probability_gap": (_scalar(max(gaps)), _scalar(1))}


def _scalar(value: Any) -> Any:
  return np.float32(value)


def _mean(values: Any) -> tuple[Any, Any]:
  array = np.asarray(values, np.float64)
  return _scalar(array.sum()), _scalar(array.size)
