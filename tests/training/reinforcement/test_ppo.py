# SPDX-License-Identifier: Apache-2.0
"""Advantages by a value head and the losses of PPO, against the formulas of the papers in NumPy."""

from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiny_model import adamw

from paxlike.devices.batch_placement import BatchPlacer
from paxlike.devices.mesh import MeshSpec
from paxlike.experiments.sums import SumsRl
from paxlike.layers.module import Definition
from paxlike.training import train_state
from paxlike.training.forward_backward import ForwardBackward, differentiated
from paxlike.training.objectives import Ppo
from paxlike.training.reinforcement.answers import Answer, of_loss, pack
from paxlike.training.reinforcement.values import Gae

SHAPE = (3, 7)


def answered(count=5):
  rng = np.random.default_rng(0)
  answers = []
  for number, size in enumerate(rng.integers(1, 7, count)):
    one = Answer(prompt=rng.integers(6, 90, 3).astype(np.int32), max_tokens=8, record=number)
    one.tokens, one.reward = rng.integers(6, 90, size).tolist(), float(rng.normal())
    one.values = rng.normal(size=size).astype(np.float32)
    one.log_probabilities = rng.normal(-2, 0.5, size).astype(np.float32)
    answers.append(one)
  return answers


def expected(answer, rewards, gamma, lam):
  """Equation 16 of Schulman et al. (2016), as the sum that it is."""
  values = [*answer.values.astype(np.float64), 0.0]
  size = len(answer.tokens)
  errors = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(size)]
  return np.array(
    [sum((gamma * lam) ** (n - t) * errors[n] for n in range(t, size)) for t in range(size)]
  )


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.8, 0.0)])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_are_those_of_the_paper(gamma, lam, beta):
  answers, trained = answered(), [True, True, False, True, True]
  references = [answer.log_probabilities + 0.1 * answer.values for answer in answers]
  own = []
  for answer, reference in zip(answers, references, strict=True):
    rewards = np.append(np.zeros(len(answer.tokens) - 1), answer.reward)
    rewards -= beta * (answer.log_probabilities - reference.astype(np.float64))
    own.append(expected(answer, rewards, gamma, lam))
  given = {"beta": beta, "references": references} if beta else {}
  plain = Gae(gae_lambda=lam, discount=gamma, whitens=False)
  metrics = plain.set_advantages(answers, trained, **given)
  for answer, of_answer in zip(answers, own, strict=True):
    np.testing.assert_allclose(answer.advantage, of_answer, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(answer.returns, of_answer + answer.values, rtol=1e-6, atol=1e-8)
  assert ("reference_kl" in metrics) == (beta > 0)
  kept = [n for n, one in enumerate(trained) if one]
  returns = np.concatenate([answers[n].returns for n in kept])
  errors = np.concatenate([own[n] for n in kept])
  explained, variance = metrics["explained_variance"]
  np.testing.assert_allclose(explained / variance, 1 - errors.var() / returns.var(), rtol=1e-6)
  Gae(gae_lambda=lam, discount=gamma).set_advantages(answers, trained, **given)
  whitened = np.concatenate([answers[n].advantage for n in kept])
  np.testing.assert_allclose(
    whitened, (errors - errors.mean()) / errors.std(ddof=1), rtol=1e-6, atol=1e-8
  )


def test_of_answers_without_a_loss_nothing_is_made():
  answers = answered(2)
  assert Gae().set_advantages(answers, [False, False]) == {}
  answers[0].tokens, answers[0].values = [7], np.ones(1, np.float32)
  Gae().set_advantages(answers, [True, False])
  assert list(answers[0].advantage) == [0]  # Of a single token.


@pytest.mark.parametrize("value_clip", [None, 0.2])
def test_the_loss_is_that_of_the_paper(value_clip):
  rng = np.random.default_rng(0)
  batch = {
    name: rng.normal(size=SHAPE).astype(np.float32)
    for name in ("advantages", "old_log_probabilities", "returns", "old_values")
  }
  batch["weights"] = (rng.uniform(size=SHAPE) * (rng.uniform(size=SHAPE) > 0.3)).astype(np.float32)
  new = batch["old_log_probabilities"] + rng.normal(0, 0.3, SHAPE).astype(np.float32)
  values = batch["old_values"] + rng.normal(0, 0.3, SHAPE).astype(np.float32)
  objective = Ppo(beta=0.7, value_weight=0.6, value_clip=value_clip)

  def of(new, values):
    return objective.loss(new, {**batch, "values": values})

  (loss, sums), slopes = jax.value_and_grad(of, (0, 1), has_aux=True)(
    jnp.array(new), jnp.array(values)
  )
  of_policy = of_values = unweighted = 0.0
  slope, moved = np.zeros(SHAPE), 0
  for place in np.ndindex(SHAPE):
    weight, advantage, target, before = (
      float(batch[name][place]) for name in ("weights", "advantages", "returns", "old_values")
    )
    if not weight:
      continue
    ratio = np.exp(float(new[place]) - float(batch["old_log_probabilities"][place]))
    of_policy -= weight * min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    value, error = float(values[place]), (float(values[place]) - target) ** 2
    slope[place] = 0.6 * weight * (value - target)
    if value_clip is not None:
      near = min(max(value, before - value_clip), before + value_clip)
      if (near - target) ** 2 > error:
        error, slope[place], moved = (near - target) ** 2, 0, moved + 1
    of_values += weight * error / 2
    unweighted += error / 2
  np.testing.assert_allclose(loss, of_policy + 0.6 * of_values, rtol=1e-5)
  np.testing.assert_allclose(slopes[1], slope, rtol=1e-5, atol=1e-6)
  assert np.abs(slopes[0]).max() > 0
  count = (batch["weights"] > 0).sum()
  np.testing.assert_allclose(sums["value_loss"], [unweighted, count], rtol=1e-5)
  if value_clip is not None:
    np.testing.assert_allclose(sums["value_clipped_fraction"], [moved, count])
    assert 0 < moved < count
  assert "reference_kl" not in sums  # It is in the rewards.


@pytest.mark.slow
def test_gradients_are_those_of_one_program_on_any_mesh():
  """The value head's weights are not 0, so that the backbone has gradients from both heads."""
  experiment = SumsRl(
    ADVANTAGES="gae", NUM_LAYERS=2, MAX_SEQ_LEN=16, FPROP_DTYPE="float32", UPDATES_PER_STEP=2,
    VALUE_CLIP=0.2,
  )  # fmt: skip
  graph = experiment.trainer()
  model: Any = fdl.build(graph.model)
  definition, objective = Definition(model), fdl.build(graph.objective)
  assert isinstance(objective, Ppo)
  optimizer, answers = adamw(peak=1e-2), answered(8)
  Gae().set_advantages(answers, [True] * 8)
  packed = pack(answers, batch_size=4, seq_len=16)
  parts = of_loss(answers, np.full(8, 0.1))
  spread = {name: packed.spread(given) for name, given in parts.items()}
  loss, found = differentiated(objective.loss), []
  for shape in ((1, 1, 1), (2, 2, 2)):
    devices = MeshSpec(ici=shape).build(jax.devices()[: int(np.prod(shape))])
    passes = ForwardBackward(definition, optimizer, sampling=objective.sampling)
    with jax.set_mesh(devices):
      state = train_state.create(definition, optimizer, devices, seed=0)
      head = state.params["value_head.w"]
      assert not np.asarray(head).any() and head.dtype == np.float32
      state.params["value_head.w"] = head + 0.1 * jnp.cos(jnp.arange(head.size))[:, None]
      put = BatchPlacer(devices, batch_size=4, seq_len=16).put
      batches = [put(batch) for batch in packed.batches]
      arrays = [put({n: of[at] for n, of in spread.items()}) for at in range(len(batches))]
      found.append(passes.gradients(passes.prepare(state), batches, arrays, loss))
  weights = {name: np.asarray(w) for name, w in state.params.items()}

  def total(params):
    model, value = definition.bind(params), 0.0
    for number, batch in enumerate(packed.batches):
      given = {**batch, **{name: of[number] for name, of in spread.items()}}
      value += objective.total(model, None, {n: jnp.array(x) for n, x in given.items()}, None)[0]
    return value

  expected = jax.jit(jax.grad(total))(weights)
  assert np.abs(expected["value_head.w"]).max() > 0.01
  for one in found:
    for name, gradient in one.total.trained.items():
      size = np.abs(expected[name]).max()
      np.testing.assert_allclose(gradient, expected[name], rtol=1e-4, atol=1e-5 * size)
