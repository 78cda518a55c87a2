# SPDX-License-Identifier: Apache-2.0
"""Rewards of answers that all processes of a job have sampled: each computes those of a share."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from paxlike.errors import RunError, UserError
from paxlike.processes import phases
from paxlike.processes.host_collectives import gathered
from paxlike.rewards.pool import RewardCalls, Rewarded, RewardPool


def begin(
  pool: RewardPool, answers: Sequence[tuple[str, Mapping[str, Any]]]
) -> Callable[[], list[Rewarded]]:
  """Begins to compute the rewards of (answer, record) pairs, which are equal in all processes.

  Returns:
    A function that waits for the rewards and returns them, equal in all processes, also those of
    random rewards and time-outs. Each process must call it. It raises:
      UserError: A reward failed in one process; raised in all of them.
      RunError: Processes have other answers than process 0.
  """
  index, count = jax.process_index(), jax.process_count()
  calls = pool.begin(answers[index::count])
  texts = json.dumps([text for text, _ in answers])
  digest = hashlib.sha256(texts.encode()).hexdigest()
  return functools.partial(_result, calls, digest, len(answers))


def _result(calls: RewardCalls, digest: str, size: int) -> list[Rewarded]:
  phases.enter("reward")
  if jax.process_count() == 1:
    return calls.result()
  found, error = [], ""
  try:
    found = calls.result()
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
    rewards[index :: len(everyone)] = [Rewarded(parts, late) for parts, late in of_share]
  return rewards
