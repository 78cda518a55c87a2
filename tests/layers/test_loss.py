# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.layers import cross_entropy


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0, 0), (0.01, 0), (0, 0.2), (0.01, 0.2)])
def test_cross_entropy_and_its_gradient_equal_the_definition(dtype, z_loss, smoothing):
  logits = (10 * jax.random.normal(jax.random.key(0), (3, 5, 11))).astype(dtype)
  targets = jax.random.randint(jax.random.key(1), (3, 5), 0, 11)
  weights = jax.random.uniform(jax.random.key(2), (3, 5))

  def definition(logits):
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    spread = (1 - smoothing) * jax.nn.one_hot(targets, 11) + smoothing / 11
    z = jnp.log(jnp.exp(logits.astype(jnp.float32)).sum(-1))
    return -(spread * log_probabilities).sum(-1) + z_loss * z**2

  def ours(logits):
    return cross_entropy(logits, targets, z_loss=z_loss, smoothing=smoothing)

  np.testing.assert_allclose(ours(logits), definition(logits), rtol=2e-5, atol=1e-5)
  got = jax.grad(lambda x: (weights * ours(x)).sum())(logits)
  expected = jax.grad(lambda x: (weights * definition(x)).sum())(logits)
  assert got.dtype == dtype
  np.testing.assert_allclose(
    got.astype(jnp.float32),
    expected.astype(jnp.float32),
    atol=2e-6 if dtype == jnp.float32 else 8e-3,
  )
