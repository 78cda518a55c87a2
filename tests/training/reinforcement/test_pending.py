# SPDX-License-Identifier: Apache-2.0
"""Answers of a step to come are in checkpoints, and importance ratios are those of the paper."""

import json

import numpy as np
import pytest

from paxlike.errors import UserError
from paxlike.training.reinforcement.answers import Answer
from paxlike.training.reinforcement.pending import Pending, importance, ratios


def sampled(*, with_values=False):
  rng = np.random.default_rng(0)
  return [
    Answer(
      prompt=rng.integers(0, 99, size).astype(np.int32),
      tokens=rng.integers(0, 99, 2 * size).tolist(),
      log_probabilities=rng.normal(-3, 1, 2 * size).astype(np.float32),
      values=rng.normal(size=2 * size if with_values else 0).astype(np.float32),
      max_tokens=9,
      record=size,
      seed=2**31 - size,
      has_ended=size % 2 == 0,
      advantage=size - 2.5,
    )
    for size in (1, 2, 3, 4)
  ]


@pytest.mark.parametrize("with_values", [False, True])
def test_they_are_the_same_after_a_checkpoint_and_damage_is_noticed(with_values):
  metrics = {"entropy": (np.float32(1.1), np.float32(3))}
  pending = Pending(answers=sampled(with_values=with_values), sampled_at=7, metrics=metrics)
  saved = json.loads(json.dumps(pending.saved()))
  restored = Pending.restored(saved)
  assert (restored.sampled_at, restored.metrics) == (7, pending.metrics)
  for one, other in zip(restored.answers, pending.answers, strict=True):
    assert one.prompt.tobytes() == other.prompt.tobytes()
    assert one.log_probabilities.tobytes() == other.log_probabilities.tobytes()
    assert one.values.tobytes() == other.values.tobytes()
    for name in ("tokens", "max_tokens", "record", "seed", "has_ended"):
      assert getattr(one, name) == getattr(other, name)
  for name, value in (("tokens", "AAAA"), ("num_tokens", [1]), ("seeds", None), ("prompts", "?")):
    with pytest.raises(UserError, match="train_input of the checkpoint are damaged"):
      Pending.restored(saved | {name: value})


def test_ratios_to_the_policy_that_sampled_are_truncated():
  answers = sampled()
  rng = np.random.default_rng(1)
  current = [
    answer.log_probabilities + rng.normal(0, 1, len(answer.tokens)).astype(np.float32)
    for answer in answers
  ]
  corrected, (exceed, count) = importance(current, answers, cap=1.5)
  found = np.concatenate(corrected["advantages"])
  all_ratios, above = [], 0
  for answer, now in zip(answers, current, strict=True):
    for new, old in zip(now, answer.log_probabilities, strict=True):
      ratio = np.exp(float(new) - float(old))
      above += ratio > 1.5
      expected = answer.advantage * min(ratio, 1.5)
      np.testing.assert_allclose(found[len(all_ratios)], expected, rtol=1e-5)
      all_ratios.append(ratio)
  assert 0 < above < len(all_ratios)
  assert (exceed, count) == (above, len(all_ratios))
  metrics = {name: total / weight for name, (total, weight) in ratios(current, answers).items()}
  for name in ("mean", "min", "max"):
    np.testing.assert_allclose(metrics[f"ratio_{name}"], getattr(np, name)(all_ratios), rtol=1e-5)
