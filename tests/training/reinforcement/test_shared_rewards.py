# SPDX-License-Identifier: Apache-2.0
"""Each process computes a share of the rewards, and all get all of them, or the same error."""

import json
from typing import Any

import jax

from paxlike.errors import RunError, UserError
from paxlike.rewards.pool import Rewarded
from paxlike.training.reinforcement import shared_rewards


class Pool:
  """Rewards a text by its length, in this process; "bad" is an error, "slow" a time-out."""

  def begin(self, answers):
    self.answers = answers
    return self

  def result(self):
    if any(text == "bad" for text, _ in self.answers):
      raise UserError("the reward failed.")
    return [
      Rewarded({}, timed_out=True) if text == "slow" else Rewarded({"size": float(len(text))})
      for text, _ in self.answers
    ]


def rewards(monkeypatch, *texts_of_processes):
  """Returns what each process gets, or the error that it raises, given the texts it sampled."""
  count, said = len(texts_of_processes), []

  def say(value):
    said.append(json.loads(json.dumps(value)))
    raise RunError("the others have not said theirs yet")

  monkeypatch.setattr(jax, "process_count", lambda: count)

  def each(gathered):
    monkeypatch.setattr(shared_rewards, "gathered", gathered)
    found = []
    for index, texts in enumerate(texts_of_processes):
      monkeypatch.setattr(jax, "process_index", lambda index=index: index)
      pool: Any = Pool()
      try:
        found.append(shared_rewards.begin(pool, [(text, {}) for text in texts])())
      except (UserError, RunError) as error:
        found.append(error)
    return found

  each(say)
  return each(lambda value: said)


def test_each_gets_all_rewards_in_order(monkeypatch):
  texts = ["a", "slow", "ccc", "dddd", "ee"]
  expected = [Rewarded({}, True) if t == "slow" else Rewarded({"size": len(t)}) for t in texts]
  for count in (2, 3, 7):
    assert rewards(monkeypatch, *[texts] * count) == [expected] * count


def test_an_error_of_one_is_that_of_all(monkeypatch):
  found = rewards(monkeypatch, *[["a", "bad", "c"]] * 2)
  assert [(type(error), str(error)) for error in found] == [(UserError, "the reward failed.")] * 2


def test_processes_that_sampled_other_answers_are_found(monkeypatch):
  for error in rewards(monkeypatch, ["a", "b"], ["a", "other"]):
    assert isinstance(error, RunError)
    assert "process 1 has sampled other answers than process 0" in str(error)
