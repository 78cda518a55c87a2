# SPDX-License-Identifier: Apache-2.0
"""Steps of reinforcement learning: sample, reward, update."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from paxlike.errors import UserError
from paxlike.layers.decoder import Batch
from paxlike.processes import phases
from paxlike.processes.host_collectives import fetched
from paxlike.rewards.pool import Rewarded
from paxlike.training.forward_backward import differentiated
from paxlike.training.objectives import shares_base, without_adapters
from paxlike.training.reinforcement.answers import Answer, Packed, of_loss
from paxlike.training.reinforcement.pending import Pending, importance, ratios
from paxlike.training.reinforcement.rollout_training import (
  Prepared,
  RolloutTraining,
  StepPrompts,
  mean,
  scalar,
)
from paxlike.training.reinforcement.sampler import Sampler
from paxlike.training.reinforcement.shared_rewards import AnswerRewards
from paxlike.training.reinforcement.values import Gae
from paxlike.training.train_state import TrainState
from paxlike.training.train_step import Metrics

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


class PolicyTraining(RolloutTraining):
  """Takes the steps of reinforcement learning."""

  def __init__(self, trainer: "Trainer"):
    """Compiles nothing, and starts no process, yet."""
    super().__init__(trainer)
    self._loss = differentiated(self._objective.loss, **self._options)
    how = self._how
    self._rewards = AnswerRewards(how, self._data, trainer.scorer(how.reward_model))
    self._pending: Pending | None = None

  @property
  def is_behind(self) -> bool:
    return self._how.behind > 0

  def saved(self) -> dict[str, Any]:
    if self._pending is None:
      return {}
    return {"answers": self._pending.saved(), "answers_of": self._knobs_of_answers}

  def restore(self, saved: Mapping[str, Any]):
    if not self.is_behind or "answers" not in saved:
      return
    for name, now in self._knobs_of_answers.items():
      if (before := saved["answers_of"].get(name)) != now:
        raise UserError(
          f"{name}={now}, but the checkpoint has answers that were sampled ahead with"
          f" {name}={before}: set it so, or ROLLOUTS_BEHIND=0, which samples them again."
        )
    self._pending = Pending.restored(saved["answers"])

  @property
  def _knobs_of_answers(self) -> dict[str, Any]:
    return {
      "PROMPTS_PER_STEP": self._how.num_prompts,
      "GROUP_SIZE": self._how.group_size,
      "MAX_SEQ_LEN": self._data.seq_len,
      "ROLLOUT_TEMPERATURE": self._objective.sampling.temperature,
    }

  def load(self, run: epath.Path | None) -> dict[str, str]:
    return self._rewards.load(run)

  def __exit__(self, *unused: object):
    self._rewards.__exit__()

  def __call__(self, state: TrainState, given: StepPrompts) -> tuple[TrainState, Metrics]:
    (prompts, following), step = given, int(state.step)
    sampler = self._sampler_of(state)
    prepared = self._passes.prepare(state)
    if following is None:
      given_answers = self._empty_answers(prompts, step=step)
      answers, packed, metrics = self._rollout(sampler, prepared, given_answers)
    else:
      answers, packed, metrics = self._rollout_ahead(sampler, prepared, (prompts, following), step)
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
      if results[0].scores.values_BT is not None:
        values = packed.collect(fetched([one.scores.values_BT for one in results]))
        corrected["old_values"] = values
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
      packed, of_samples = self._sampled(sampler, prepared, answers)
      metrics = _added(metrics, of_samples | self._rewarded(answers))
      if how.most_prompts is None:
        return answers, packed, metrics
      kept += [group for group in now if len({answer.reward for answer in group}) > 1]
      if len(kept) == how.num_prompts or not left:
        break
    metrics["prompts_tried"] = scalar(num_given - len(left)), scalar(1)
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
      _, metrics = self._sampled(sampler, prepared, answers)
      return Pending(answers=answers, sampled_at=step, metrics=metrics)

    def begin(pending: Pending):
      pending.rewards = self._rewards.begin(pending.answers)

    now = self._pending or sampled(0)
    if now.rewards is None:
      begin(now)
    self._pending = ahead = sampled(1)
    assert now.rewards is not None
    metrics = dict(now.metrics) | self._set_rewards(now.answers, now.rewards())
    begin(ahead)  # They are computed during this step's update and the next step's sampling.
    staleness = (step - now.sampled_at) * self._how.num_updates
    metrics["staleness"] = scalar(staleness), scalar(1)
    return now.answers, sampler.packed(now.answers), metrics

  def _rewarded(self, answers: Sequence[Answer]) -> Metrics:
    """Computes and sets the rewards and advantages of answers."""
    return self._set_rewards(answers, self._rewards.begin(answers)())

  def _set_rewards(self, answers: Sequence[Answer], found: Sequence[Rewarded]) -> Metrics:
    how = self._how
    for answer, one in zip(answers, found, strict=True):
      answer.reward = one.total
    rewards_PG = np.array([one.total for one in found]).reshape(-1, how.group_size)
    if not isinstance(how.advantages, Gae):
      for answer, advantage in zip(answers, how.advantages(rewards_PG).reshape(-1), strict=True):
        answer.advantage = float(advantage)
    metrics = {
      "reward": mean(rewards_PG),
      "equal_groups_fraction": mean(np.ptp(rewards_PG, axis=1) == 0),
      "reward_timeouts": (scalar(sum(one.timed_out for one in found)), scalar(1)),
    }
    if how.reward_model is not None:
      metrics["reward_model_cut_fraction"] = mean([one.was_cut for one in found])
    names = sorted({name for one in found for name in one.parts} - {"reward"})
    parts = {f"reward/{n}": mean([one.parts.get(n, 0.0) for one in found]) for n in names}
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
    return {name: (scalar(total), scalar(weight)) for name, (total, weight) in found.items()}

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
    num_tokens = scalar(sum(place.end - place.first for place in packed.places))
    metrics = {
      "loss": (step.loss * num_tokens, num_tokens),
      **{name: (pair[0], pair[1]) for name, pair in (step.sums | step.aux.metrics).items()},
      **{name: (value, scalar(len(arrays))) for name, value in step.aux.losses.items()},
      **{name: (value, scalar(1)) for name, value in of_update.items()},
    }
    return state, found, metrics


def _added(some: Metrics, more: Metrics) -> Metrics:
  """Returns the sums of metrics; what one of them lacks is zero."""
  added = {n: (some[n][0] + pair[0], some[n][1] + pair[1]) for n, pair in more.items() if n in some}
  return some | more | added


def _gap(found: Sequence[np.ndarray], answers: Sequence[Answer]) -> Metrics:
  """Returns the largest difference to the log-probabilities with which answers were accepted."""
  pairs = zip(found, answers, strict=True)
  gaps = [np.abs(one - answer.log_probabilities).max() for one, answer in pairs]
  return {"log_probability_gap": (scalar(max(gaps)), scalar(1))}
