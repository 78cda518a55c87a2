# SPDX-License-Identifier: Apache-2.0
"""Rewards of answers that all processes of a job have sampled: each computes those of a share."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax
from etils import epath

from paxlike.data.tuning.prompts import Prompts
from paxlike.errors import RunError, UserError
from paxlike.processes import phases
from paxlike.processes.host_collectives import gathered
from paxlike.rewards.pool import Rewarded, RewardPool
from paxlike.training.reinforcement.answers import Answer, decoded
from paxlike.training.reinforcement.model_reward import AnswerScorer

if TYPE_CHECKING:
  from paxlike.training.reinforcement.reward_set import RewardSet
  from paxlike.training.reinforcement.rollouts import Rollouts

MODEL = "reward_model"  # The name of its rewards.


class AnswerRewards:
  """Rewards of answers by a function, a reward model, or both; a context that ends processes."""

  def __init__(self, how: "Rollouts | RewardSet", data: Prompts, scorer: AnswerScorer | None):
    """Starts no process yet; `scorer` is that of the reward model of `how`."""
    self._data = data
    self._scorer = scorer
    self._pool = None
    if how.reward is not None:
      self._pool = RewardPool(
        how.reward, num_workers=how.reward_workers, seconds=how.reward_seconds
      )

  def load(self, run: epath.Path | None) -> dict[str, str]:
    """Loads the reward model, if any; see `AnswerScorer.load`."""
    return {} if self._scorer is None else self._scorer.load(run)

  def begin(self, answers: Sequence[Answer]) -> Callable[[], list[Rewarded]]:
    """Begins to compute the rewards of answers, which are equal in all processes.

    Returns:
      A function that waits for those of the function, then computes those of the reward model, and
      returns their sums; see `begin`.
    """
    given = decoded(answers, self._data)
    return functools.partial(self._result, begin(self._pool, given), answers, given)

  def _result(
    self,
    of_function: Callable[[], list[Rewarded]],
    answers: Sequence[Answer],
    given: Sequence[tuple[str, Mapping[str, Any]]],
  ) -> list[Rewarded]:
    found = of_function()
    if self._scorer is None:
      return found
    conversations = []
    for answer, (text, _) in zip(answers, given, strict=True):
      messages, variables = self._data.asked(answer.record)
      conversations.append(([*messages, {"role": "assistant", "content": text}], variables))
    return [
      Rewarded(one.parts | {MODEL: one.parts.get(MODEL, 0.0) + reward}, one.timed_out, was_cut)
      for one, reward, was_cut in zip(found, *self._scorer(conversations), strict=True)
    ]

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    if self._pool is not None:
      self._pool.__exit__()


def begin(
  pool: RewardPool | None, answers: Sequence[tuple[str, Mapping[str, Any]]]
) -> Callable[[], list[Rewarded]]:
  """Begins to compute the rewards of (answer, record) pairs, which are equal in all processes.

  Without a pool, they have no parts.

  Returns:
    A function that waits for the rewards and returns them, equal in all processes, also those of
    random rewards and time-outs. Each process must call it. It raises:
      UserError: A reward failed in one process; raised in all of them.
      RunError: Processes have other answers than process 0.
  """
  index, count = jax.process_index(), jax.process_count()
  share = answers[index::count]
  nothing: Callable[[], list[Rewarded]] = functools.partial(list, [Rewarded({})] * len(share))
  result = nothing if pool is None else pool.begin(share).result
  texts = json.dumps([text for text, _ in answers])
  digest = hashlib.sha256(texts.encode()).hexdigest()
  return functools.partial(_result, result, digest, len(answers))


def _result(result: Callable[[], list[Rewarded]], digest: str, size: int) -> list[Rewarded]:
  phases.enter("reward")
  if jax.process_count() == 1:
    return result()
  found, error = [], ""
  try:
    found = result()
  except UserError as raised:
    error = str(raised)
  everyone = gathered([digest, error, found])
  for index, (of_answers, failed, _) in enumerate(everyone):
    if failed:
      raise UserError(failed)
    if of_answers != everyone[0][0]:
      raise RunError(
        f"process {index} has sampled other answers than process 0: its devices are of another"
        " kind, or one of them computes wrong numbers (--mode=check)."
      )
  rewards = [Rewarded({}) for _ in range(size)]
  for index, (*_, of_share) in enumerate(everyone):
    rewards[index :: len(everyone)] = [Rewarded(*one) for one in of_share]
  return rewards
