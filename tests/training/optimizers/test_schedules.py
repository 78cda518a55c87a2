# SPDX-License-Identifier: Apache-2.0
from typing import Any

import numpy as np
import pytest

from paxlike.training import optimizers

SHAPE = {"peak": 2.0, "warmup": 10, "decay_start": 20, "decay_end": 120, "min_ratio": 0.1}


@pytest.mark.parametrize(
  ("schedule", "middle"),
  [
    (optimizers.linear_rampup_cosine_decay, 2 * 0.55),
    (optimizers.linear_rampup_exponential_decay, 2 * np.sqrt(0.1)),
  ],
)
def test_schedules_pass_through_their_corners(schedule, middle):
  rate: Any = schedule(**SHAPE)
  for step, expected in [
    (0, 0.0),
    (5, 1.0),
    (10, 2.0),
    (20, 2.0),
    (70, middle),
    (120, 0.2),
    (1000, 0.2),
  ]:
    assert float(rate(step)) == pytest.approx(expected, rel=1e-5), step


@pytest.mark.parametrize(
  "schedule",
  [optimizers.linear_rampup_cosine_decay, optimizers.linear_rampup_exponential_decay],
)
@pytest.mark.parametrize("decay_end", [15, 5])
def test_a_decay_begins_after_the_warmup_and_takes_a_step(schedule, decay_end):
  rate: Any = schedule(**SHAPE | {"decay_start": 9, "decay_end": decay_end})
  risen = [float(rate(step)) for step in range(11)]
  np.testing.assert_allclose(risen, np.linspace(0, 2, 11), rtol=1e-5)
  assert float(rate(30)) == pytest.approx(0.2, rel=1e-5)


def test_a_schedule_without_room_to_decay_is_still_finite():
  rate: Any = optimizers.linear_rampup_cosine_decay(
    peak=1.0, warmup=10, decay_start=11, decay_end=5, min_ratio=0.1
  )
  assert all(np.isfinite(float(rate(step))) for step in range(30))


def values(schedule: Any, *steps: int) -> list[float]:
  return [float(schedule(step)) for step in steps]


def test_simple_schedules_pass_through_their_corners():
  made = optimizers.linear(peak=2.0, warmup=10, decay_end=110, min_ratio=0.1)
  assert values(made, 0, 5, 10, 60, 110, 500) == pytest.approx([0, 1, 2, 1.1, 0.2, 0.2])
  made = optimizers.inverse_sqrt(peak=2.0, warmup=100)
  assert values(made, 0, 50, 100, 400, 10_000) == pytest.approx([0, 1, 2, 1, 0.2])
  made = optimizers.cosine_restarts(peak=2.0, warmup=10, decay_end=50, cycles=2, min_ratio=0.5)
  ends = [0, 10, 20, 29, 30, 40, 49, 50, 99]
  expected = [0, 2, 1.5, 1.006155, 2, 1.5, 1.006155, 1, 1]
  assert values(made, *ends) == pytest.approx(expected, rel=1e-4)
  made = optimizers.ramp(first=0.1, last=0.3, steps=20)
  assert values(made, 0, 10, 20, 30) == pytest.approx([0.1, 0.2, 0.3, 0.3])


@pytest.mark.parametrize(
  ("shape", "quarter"), [("linear", 0.75), ("sqrt", 0.5), ("cosine", 0.5 + 0.5**1.5)]
)
def test_a_stable_rate_decays_in_each_shape(shape, quarter):
  made = optimizers.warmup_stable_decay(
    peak=2.0, warmup=10, decay_start=60, decay_end=100, min_ratio=0.2, shape=shape
  )
  expected = [0, 2, 2, 2, 2 * (0.2 + 0.8 * quarter), 0.4, 0.4]
  assert values(made, 0, 10, 59, 60, 70, 100, 101) == pytest.approx(expected)
  late = optimizers.warmup_stable_decay(
    peak=2.0, warmup=80, decay_start=60, decay_end=100, min_ratio=0.2, shape=shape
  )
  assert values(late, 40, 80, 85, 100) == pytest.approx([1, 2, 2 * (0.2 + 0.8 * quarter), 0.4])
