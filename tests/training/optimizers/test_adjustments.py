# SPDX-License-Identifier: Apache-2.0
"""What changes the steps of any optimizer: scales of learning rates, clipping, decay, averages."""

import dataclasses
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.program import TEXT, curve, run
from helpers.shrunk import shrunk

from paxlike.errors import UserError
from paxlike.experiments.gpt import Gpt3_52k
from paxlike.training import optimizers
from paxlike.training.optimizers.optimizer import by_layer, resolved


def optimizer_of(**knobs: Any) -> optimizers.Optimizer:
  given = {"LEARNING_RATE": 0.1, "LR_SCHEDULE": "constant", "CLIP_GRADIENT_NORM_TO_VALUE": None}
  return fdl.build(Gpt3_52k(**given | knobs).optimizer())


def updates_of(
  optimizer: optimizers.Optimizer, *, steps: int = 1, first_layer: float = 1.0
) -> tuple[Any, Any, Any]:
  """(updates, weights before the last of them, state), with gradients that are the same."""
  definition = shrunk("SyntheticLLaMA70B", scan=True)
  random = np.random.default_rng(0)
  weights = definition.optimized(definition.weights)
  params: Any = {
    n: jnp.asarray(random.normal(size=s.shape), jnp.float32) for n, s in weights.items()
  }
  gradients: Any = {n: jnp.asarray(random.normal(size=s.shape)) for n, s in weights.items()}
  for name in gradients:
    if "pattern" in name:
      gradients[name] = gradients[name].at[0].multiply(first_layer)
  transform = optimizer.transformation(definition)
  state, update = transform.init(params), jax.jit(transform.update)
  updates: Any = jax.tree.map(jnp.zeros_like, params)
  for _ in range(steps):
    params = jax.tree.map(jnp.add, params, updates)
    updates, state = update(gradients, state, params)
  return updates, params, state


def test_rates_and_weight_decays_are_scaled_by_patterns_of_names():
  plain, _, _ = updates_of(optimizer_of())
  scales = {"embedding": 0.5, r"^stack\.attention\.": 3.0, "query": 0.1}
  scaled, _, _ = updates_of(optimizer_of(LEARNING_RATE_SCALES=scales))
  factors = set()
  for name, update in plain.items():
    factor = (0.5 if "embedding" in name else 1) * (3.0 if ".attention." in name else 1)
    factor *= 0.1 if "query" in name else 1
    factors.add(round(factor, 3))
    np.testing.assert_allclose(scaled[name], factor * update, rtol=1e-5, err_msg=name)
  assert factors == {0.5, 1, 3, 0.3}
  decayed, _, _ = updates_of(optimizer_of(WEIGHT_DECAY_SCALES=scales))
  none, _, _ = updates_of(optimizer_of(WEIGHT_DECAY=0.0))
  for name, update in plain.items():
    factor = float((scaled[name] / update).mean())
    expected = none[name] + factor * (update - none[name])
    np.testing.assert_allclose(decayed[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)
  with pytest.raises(UserError, match=r"^LEARNING_RATE_SCALES: 'querry' is in no name of a tr"):
    updates_of(optimizer_of(LEARNING_RATE_SCALES={"querry": 2.0}))
  with pytest.raises(UserError, match=r"^LEARNING_RATE_SCALES: '\(' is not a regular expression"):
    updates_of(optimizer_of(LEARNING_RATE_SCALES={"(": 2.0}))


def test_updates_are_clipped_layer_by_layer():
  """Large epsilons make updates proportional to gradients, here far smaller in the first layer."""
  given = {"CLIP_UPDATE_RMS_TO_VALUE": 0.3, "WEIGHT_DECAY": 0, "ADAM_EPSILON": 1.0}
  clipped, _, _ = updates_of(optimizer_of(**given), first_layer=0.1)
  plain, _, _ = updates_of(
    optimizer_of(**given | {"CLIP_UPDATE_RMS_TO_VALUE": None}), first_layer=0.1
  )
  seen = set()
  for name, update in clipped.items():
    layers, whole = (x if "pattern" in name else x[None] for x in (update, plain[name]))
    for one, other in zip(layers, whole, strict=True):
      rms = float(jnp.sqrt(jnp.square(other / 0.1).mean()))
      seen.add(rms > 0.3)
      np.testing.assert_allclose(one, other * min(1, 0.3 / rms), rtol=1e-3, err_msg=name)
  assert seen == {True, False}


def test_an_update_of_one_number_is_clipped():
  clipping = by_layer(optax.clip_by_block_rms(0.5))
  spec = dataclasses.replace(shrunk("SyntheticLLaMA70B").weights["norm.scale"], shape=(), dims=())
  transform, params = resolved(clipping, {"x": spec}), {"x": jnp.ones(())}
  updates, _ = transform.update({"x": jnp.float32(2)}, transform.init(params), params)
  assert jax.tree.map(float, updates) == {"x": 0.5}


def test_weight_decay_changes_linearly_to_its_end():
  given = {"WEIGHT_DECAY": 0.1, "WEIGHT_DECAY_END": 0.3, "MAX_STEPS": 10}
  for steps, decay in ((1, 0.1), (6, 0.2), (11, 0.3)):
    with_decay, params, _ = updates_of(optimizer_of(**given), steps=steps)
    without, _, _ = updates_of(optimizer_of(WEIGHT_DECAY=0), steps=steps)
    for name, update in with_decay.items():
      expected = without[name] - 0.1 * decay * params[name]
      np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_averages_have_their_half_lives():
  knobs = {"EMA_HALF_LIVES": (1.0, 4.0), "EMA_EVALUATED": 4.0}
  optimizer = optimizer_of(**knobs)
  assert optimizer.observe is not None and optimizer.evaluated is not None
  _, params, state = updates_of(optimizer)
  names, random, seen = list(params), np.random.default_rng(0), []
  for step in range(12):
    new = {
      name: jnp.asarray(random.normal(size=w.shape), jnp.float32) for name, w in params.items()
    }
    seen.append(new[names[0]])
    state = optimizer.observe(state, new, jnp.int32(step))
    for life in (1.0, 4.0):
      expected = 0.0
      for n, w in enumerate(seen):  # A mean until it is 1.44 half-lives old.
        share = max(1 - 0.5 ** (1 / life), 1 / (n + 1))
        expected = expected * (1 - share) + share * w
      if step < 1.44 * life:
        np.testing.assert_allclose(expected, np.mean(seen, 0), rtol=1e-4, atol=1e-6)
      found = state.weights[f"{life:g}"][names[0]]
      np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert optimizer.evaluated(state, new) is state.weights["4"]


def test_averages_that_do_not_fit_are_refused():
  with pytest.raises(UserError, match=r"^EMA_EVALUATED=3 is not in EMA_HALF_LIVES=\[2.0\]\.\n"):
    optimizer_of(EMA_HALF_LIVES=(2.0,), EMA_EVALUATED=3.0)
  with pytest.raises(UserError, match=r"^EMA_HALF_LIVES: this OPTIMIZER evaluates an average of"):
    optimizer_of(EMA_HALF_LIVES=(2.0,), OPTIMIZER="schedule_free_adamw")


@pytest.mark.slow
def test_averages_are_evaluated(tmp_path, text):
  """On a mesh. The average of a short half-life is the weights, of a long one their mean."""
  flags = (*TEXT, f"--fdl.DATA_PATH={text}", "--fdl.MAX_STEPS=8", "--fdl.ICI_MESH_SHAPE=[2,2,2]")
  losses = {}
  for lives in ("[]", "[1e-3,1e6]", "[1e6,1e-3]"):
    folder = tmp_path / str(len(losses))
    assert run(*flags, f"--fdl.EMA_HALF_LIVES={lives}", f"--job_log_dir={folder}") == 0
    losses[lives] = curve(folder, "eval")[-1][1]
  assert losses["[1e-3,1e6]"] == pytest.approx(losses["[]"], rel=1e-6)
  assert losses["[]"] + 0.1 < losses["[1e6,1e-3]"] < np.log(257) - 0.1
