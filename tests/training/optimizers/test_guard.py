# SPDX-License-Identifier: Apache-2.0
"""Spikes are found by a robust bound, and do not reach the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.program import TINY, run
from helpers.tiny_model import adamw, batch, tiny

from paxlike.devices.mesh import MeshSpec
from paxlike.training import optimizers, train_state
from paxlike.training.train_step import make_train_step


def test_the_bound_is_that_of_numpy_and_spikes_do_not_move_it():
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
    if not expected:
      for kept, value in zip(last, values, strict=True):
        kept.append(value)
  assert {20, 21, 22, 40} <= set(spikes) and len(spikes) < 10
  # A checkpoint of another window: only the count is read.
  assert not bool(judge(guard.init() | {"count": state["count"]}, *map(jnp.float32, values)).spike)
  not_finite = judge(state, jnp.float32(np.nan), jnp.float32(1))
  assert not bool(not_finite.spike) and int(not_finite.state["count"]) == int(state["count"])


def losses(action: Any, injected: tuple[int, ...], *, steps: int = 60) -> tuple[Any, list[int]]:
  """(the loss of each step on the same batch, spikes found); injected steps have other targets."""
  guard = optimizers.Guard(action=action, deviations=8.0, window=16)
  optimizer = optimizers.guarded(adamw(peak=0.02, eps=1e-8), guard=guard)
  built, definition = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1]), tiny()
  curve, found, clean = [], [], batch(4)
  with jax.set_mesh(built):
    state = train_state.create(definition, optimizer, built, seed=0)
    step = jax.jit(make_train_step(definition, optimizer, seed=0))
    for number in range(steps):
      given = clean
      if number in injected:
        given = clean | {"targets": (clean["targets"] + 1 + number) % 96}
      state, metrics = step(state, given)
      curve.append(float(metrics["loss"][0] / metrics["loss"][1]))
      if float(metrics["spike"][0]):
        found.append(number)
  return np.array(curve), found


@pytest.mark.slow
@pytest.mark.parametrize("action", ["skip", "clip", "report"])
def test_injected_spikes_are_all_found(action):
  injected = (25, 26, 40)
  curve, found = losses(action, injected)
  clean, none = losses(action, ())
  assert none == [] and set(injected) <= set(found)
  if action == "skip":  # The curve goes on as if those steps had not been.
    assert found == list(injected)
    others = [n for n in range(60) if n not in injected]
    np.testing.assert_allclose(curve[others], clean[: len(others)], rtol=1e-4)


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
