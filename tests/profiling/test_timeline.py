# SPDX-License-Identifier: Apache-2.0
"""The time of a device is divided without a rest, also among what runs at the same time."""

import numpy as np
import pytest

from paxlike.profiling.timeline import divide
from paxlike.profiling.trace import Interval


def test_what_runs_at_once_shares_the_time_and_collectives_take_what_is_left():
  runs = [
    Interval("matmul", 0, 0.0, 4.0),
    Interval("add", 0, 3.0, 5.0),
    Interval("all-reduce", 0, 2.0, 7.0),
    Interval("matmul", 0, 9.0, 10.0),
    Interval("add", 1, 0.0, 1.0),
  ]
  found = divide(runs, is_hidden=lambda name: name == "all-reduce")
  assert found.times["matmul"] == (2, 5.0, 3.0 + 0.5 + 1.0)
  assert found.times["add"] == (2, 3.0, 0.5 + 1.0 + 1.0)
  assert found.times["all-reduce"] == (1, 5.0, 2.0)
  assert (found.idle, found.total) == (2.0 + 9.0, 20.0)


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_a_clock_that_ticks(seed):
  """Each tick is divided among what runs in it."""
  random = np.random.default_rng(seed)
  runs = []
  for _ in range(40):
    start, length = random.integers(0, 100, 2)
    name = str(random.choice(["a", "b", "c", "hidden"]))
    runs.append(Interval(name, int(random.integers(2)), float(start), float(start + length % 9)))
  found = divide(runs, is_hidden=lambda name: name == "hidden")
  shares, idle = dict.fromkeys("abc", 0.0) | {"hidden": 0.0}, 0.0
  first, last = min(one.start for one in runs), max(one.end for one in runs)
  for device in (0, 1):
    for tick in np.arange(first, last):
      active = [o for o in runs if o.device == device and o.start <= tick < o.end]
      active = [o for o in active if o.name != "hidden"] or active
      idle += not active
      for one in active:
        shares[one.name] += 1 / len(active)
  assert found.idle == pytest.approx(idle)
  for name, times in found.times.items():
    assert times.exposed == pytest.approx(shares[name])
  assert found.total == pytest.approx(sum(shares.values()) + idle)
