# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import pytest

from paxlike.telemetry.step_metrics import Meter


def metrics(step):
  return {"loss": (jnp.float32(6.0 * step), jnp.float32(3.0))}


@pytest.mark.parametrize("depth", [0, 2])
def test_every_step_is_read_once_in_order_and_at_most_depth_late(depth):
  meter = Meter(depth=depth)
  seen = []
  for step in range(6):
    given = metrics(step)
    seen += list(meter.add(step, given))
    assert len(seen) == max(step + 1 - depth, 0)
  seen += list(meter.flush())
  assert [reading.step for reading in seen] == list(range(6))
  assert [reading.values["loss"] for reading in seen] == [2.0 * step for step in range(6)]
  assert {reading.weight for reading in seen} == {3.0}


def test_no_step_is_timed_across_a_pause():
  meter = Meter(depth=0)
  timed = []
  for step in range(4):
    if step == 2:
      meter.pause("saving")
    (reading,) = meter.add(step, metrics(step))
    timed.append(reading.causes)
    assert (reading.seconds is None) == bool(reading.causes)
  assert timed == [("start", "compilation"), (), ("saving",), ()]
