# SPDX-License-Identifier: Apache-2.0
"""Spikes are found by a robust bound, and do not reach the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.program import TINY, run
from helpers.spikes import losses, recovery

from paxlike.training import optimizers


def test_the_bound_is_that_of_numpy_and_a_spike_counts_as_a_step_at_the_bound():
  guard = optimizers.Guard(action="skip", deviations=5.0, window=8)
  judge, state = jax.jit(guard.judge), guard.init()
  last: Any = [[], []]
  random, spikes = np.random.default_rng(0), []
  for step in range(60):
    values = [abs(random.normal(3, 0.1)), abs(random.normal(1, 0.2))]
    if step in (20, 21, 22, 40):
      values[step % 2] *= 4
    bounds = []
    for kept in last:
      middle = np.median(kept[-8:]) if kept else 0
      deviation = 1.4826 * np.median(np.abs(kept[-8:] - middle)) if kept else 0
      bounds.append(middle + 5 * max(deviation, 0.01 * middle))
    expected = len(last[0]) >= 8 and any(v > b for v, b in zip(values, bounds, strict=True))
    verdict = judge(state, *map(jnp.float32, values))
    assert bool(verdict.spike) == expected == (not bool(verdict.keep)), step
    state = verdict.state
    spikes += [step] * expected
    for kept, value, bound in zip(last, values, bounds, strict=True):
      kept.append(value if len(kept) < 8 else min(value, bound))
  assert {20, 21, 22, 40} <= set(spikes) and len(spikes) < 10
  # A checkpoint of another window: only the count is read.
  assert not bool(judge(guard.init() | {"count": state["count"]}, *map(jnp.float32, values)).spike)
  not_finite = judge(state, jnp.float32(np.nan), jnp.float32(1))
  assert not bool(not_finite.spike) and int(not_finite.state["count"]) == int(state["count"])
  infinite = judge(state, jnp.float32(np.inf), jnp.float32(1))
  assert bool(infinite.spike) and np.isfinite(infinite.state["last"]).all()


def test_a_lasting_change_is_no_spike_for_ever():
  guard = optimizers.Guard(action="report", window=16)
  judge, state, random, found = jax.jit(guard.judge), guard.init(), np.random.default_rng(0), []
  for step in range(100):
    loss = random.normal(3 if step < 40 else 3.5, 0.02)
    verdict = judge(state, jnp.float32(loss), jnp.float32(1))
    state, found = verdict.state, [*found, bool(verdict.spike)]
  assert not any(found[:40]) and 4 < sum(found) < 20 and not any(found[60:])


@pytest.mark.slow
def test_the_curve_goes_on_as_if_skipped_spikes_had_not_been():
  injected = (25, 26, 40)
  curve, found = losses("skip", injected)
  clean, none = losses("skip", ())
  assert found == list(injected) and none == []
  others = [n for n in range(60) if n not in injected]
  np.testing.assert_allclose(curve[others], clean[: len(others)], rtol=1e-4)


@pytest.mark.slow
def test_the_loss_recovers_in_a_few_steps():
  after = {action: recovery(action, 30, within=25) for action in ("skip", "clip", "report")}
  assert after["skip"] == 1 and after["clip"] <= 12 < after["report"]


@pytest.mark.slow
def test_a_guard_may_be_added_to_a_run(tmp_path, capsys):
  """Its state begins anew; a checkpoint with it is read without it, too."""
  flags = (*TINY, f"--job_log_dir={tmp_path}", "--fdl.MAX_STEPS=6")
  guarded = ["--fdl.ON_SPIKE=skip", "--fdl.SPIKE_WINDOW=1"]
  for steps, more in ((2, []), (3, guarded), (4, [guarded[0], "--fdl.SPIKE_WINDOW=2"]), (6, [])):
    assert run(*flags, f"--fdl.num_steps={steps}", *more) == 0
  out = capsys.readouterr().out
  assert "resuming from checkpoint 4" in out
  assert "completed step: 3," in out and "step 3: spike" not in out
