# SPDX-License-Identifier: Apache-2.0
"""Eval sets of prompts, whose answers are sampled and rewarded."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.inference.generate import STEPS_PER_CALL
from paxlike.inference.sampling import Sampling
from paxlike.layers.module import Definition, Params
from paxlike.processes import phases
from paxlike.training.evaluation import EvalSet, Result, Stopped, result
from paxlike.training.reinforcement.answers import Answer, decoded
from paxlike.training.reinforcement.drafts import Drafter
from paxlike.training.reinforcement.model_reward import AnswerScorer, ModelReward
from paxlike.training.reinforcement.shared_rewards import AnswerRewards


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardSet(EvalSet):
  """Prompts to evaluate on, by the mean reward of one answer to each.

  Attributes:
    reward: A function of a module: see `paxlike.rewards`. None: there is none.
    reward_model: A reward model, whose rewards are added. None: there is none.
    max_new_tokens: The most tokens of an answer.
    num_prompts: Evaluate on the first so many; None: all.
    sampling: How answers are sampled; greedily by default.
    num_slots: Decode slots; see `Generator`.
    seed: Of the sampling.
    reward_seconds: Time limit of one reward.
    reward_workers: Processes that compute rewards.
  """

  reward: Callable[[str, Mapping[str, Any]], Any] | None
  reward_model: ModelReward | None = None
  max_new_tokens: ranges.Size
  num_prompts: ranges.Size | None = None
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  num_slots: ranges.Size = 64
  seed: ranges.NonNegative = 0
  reward_seconds: ranges.Interval = 10.0
  reward_workers: ranges.Size = 4

  def __post_init__(self):
    if self.num_batches is not None:
      raise UserError("num_batches of a RewardSet has no effect: set num_prompts.")

  @property
  def names(self) -> list[str]:
    return ["reward", "answer_tokens", "truncated_fraction"]


class RewardEvaluator:
  """Computes the mean reward of a `RewardSet`, with the same compiled programs for all passes."""

  def __init__(
    self,
    definition: Definition,
    reward_set: RewardSet,
    *,
    scorer: AnswerScorer | None = None,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """Compiles nothing yet; `scorer` is that of the reward model, `compiler_options` are XLA's."""
    self._definition = definition
    self._set = reward_set
    self._data: Any = reward_set.dataset
    self._scorer = scorer
    self._options = compiler_options
    self._drafter: Drafter | None = None

  def run(
    self, params: Params, *, name: str = "", stops: Callable[[], bool] = lambda: False
  ) -> Result:
    """Returns the mean reward of the answers of a model; see `Evaluator.run`."""
    phases.enter("eval", name)
    answers = self._answers(params, stops)
    with AnswerRewards(self._set, self._data, self._scorer) as computing:
      rewards = np.array([one.total for one in computing.begin(answers)()])
    sizes, ones = np.array([len(a.tokens) for a in answers], np.float64), np.ones(len(answers))
    sums = {
      "num_predictions": (sizes, ones),
      "reward": (rewards, ones),
      "answer_tokens": (sizes, ones),
      "truncated_fraction": (np.array([not a.has_ended for a in answers], np.float64), ones),
    }
    found = result(sums, np.array([answer.record for answer in answers]))
    given = zip(answers, decoded(answers, self._data), strict=True)
    texts: dict[Any, Any] = {answer.record: text for answer, (text, _) in given}
    records = [one | {"answer": texts[one["example"]]} for one in found.records]
    return Result(found.values, records)

  def _answers(self, params: Params, stops: Callable[[], bool]) -> Sequence[Answer]:
    count = self._data.num_rows(0)
    count = min(count, self._set.num_prompts or count)
    rows = self._data.rows(0, np.arange(count))
    answers = [
      Answer(
        prompt=row[row >= 0],
        record=int(record),
        seed=self._set.seed + number,
        max_tokens=self._set.max_new_tokens,
      )
      for number, (row, (record,)) in enumerate(zip(rows["prompts"], rows["records"], strict=True))
    ]
    for _ in self._loaded(params, num_slots=min(self._set.num_slots, count)).draft(answers):
      if stops():
        raise Stopped
    return answers

  def _loaded(self, params: Params, *, num_slots: int) -> Drafter:
    if self._drafter is not None:
      self._drafter.load(params)
      return self._drafter
    self._drafter = Drafter(
      self._definition,
      params,
      num_slots=num_slots,
      seq_len=self._data.seq_len,
      end_ids=self._data.end_ids,
      steps_per_call=min(STEPS_PER_CALL, self._set.max_new_tokens),
      sampling=self._set.sampling,
      phase="decode",
      compiler_options=self._options,
    )
    return self._drafter
