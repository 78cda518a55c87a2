# SPDX-License-Identifier: Apache-2.0
"""The clipped policy gradient and its advantages, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.training.objectives import Grpo
from paxlike.training.reinforcement import advantages

SHAPE = (3, 7)


def batch_of(seed):
  rng = np.random.default_rng(seed)
  old, new, reference = (rng.normal(-2, 0.5, SHAPE).astype(np.float32) for _ in range(3))
  weights = rng.uniform(0.1, 1, SHAPE).astype(np.float32) * (rng.uniform(size=SHAPE) > 0.3)
  given = {
    "weights": weights,
    "advantages": rng.normal(size=SHAPE).astype(np.float32),
    "old_log_probabilities": old,
    "reference_log_probabilities": reference,
  }
  return given, new


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("clip_high", [0.2, 0.28])
def test_the_loss_is_that_of_the_paper(beta, clip_high):
  batch, new = batch_of(0)
  objective = Grpo(clip_low=0.2, clip_high=clip_high, beta=beta)
  (loss, sums), slope = jax.value_and_grad(objective.loss, has_aux=True)(jnp.array(new), batch)
  expected, clipped, slopes = 0.0, 0, np.zeros(SHAPE)
  for place in np.ndindex(SHAPE):
    weight, advantage = (float(batch[name][place]) for name in ("weights", "advantages"))
    if not weight:
      continue
    ratio = np.exp(float(new[place]) - float(batch["old_log_probabilities"][place]))
    kept = min(max(ratio, 0.8), 1 + clip_high)
    expected -= weight * min(ratio * advantage, kept * advantage)
    is_clipped = kept * advantage < ratio * advantage
    clipped += is_clipped
    slopes[place] = 0 if is_clipped else -weight * ratio * advantage
    back = float(batch["reference_log_probabilities"][place]) - float(new[place])
    expected += beta * weight * ratio * (np.exp(back) - 1 - back)
    slopes[place] -= beta * weight * ratio * back  # That of the divergence itself.
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(slope, slopes, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(sums["clipped_fraction"], [clipped, (batch["weights"] > 0).sum()])
  assert ("reference_kl" in sums) == (beta > 0)


def test_on_the_policy_that_sampled_it_is_the_plain_policy_gradient():
  batch, new = batch_of(1)
  batch["old_log_probabilities"] = new
  slope = jax.grad(lambda x: Grpo().loss(x, batch)[0])(jnp.array(new))
  np.testing.assert_allclose(slope, -batch["weights"] * batch["advantages"], rtol=1e-6)


def test_advantages_compare_answers_to_the_same_prompt():
  rewards = np.array([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]])
  mean = np.array([0.0, -1.0, -1.0, 2.0])
  np.testing.assert_allclose(advantages.dr_grpo(rewards), [mean, np.zeros(4)])
  np.testing.assert_allclose(advantages.grpo(rewards)[0], mean / (np.sqrt(2) + 1e-4))
  np.testing.assert_allclose(advantages.rloo(rewards)[0, 0], 1 - (0 + 0 + 3) / 3)
  assert not advantages.grpo(rewards)[1].any()


def test_the_weights_of_tokens():
  sizes = np.array([2, 0, 6])
  np.testing.assert_allclose(advantages.by_token(sizes, 10), 1 / 8)
  np.testing.assert_allclose(advantages.by_limit(sizes, 10), 1 / 30)
  by_answer = advantages.by_answer(sizes, 10)
  np.testing.assert_allclose(by_answer[[0, 2]], [1 / 6, 1 / 18])
