# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.compilation import hlo_collectives
from paxlike.devices import topology
from paxlike.devices.mesh import MeshSpec
from paxlike.layers import cross_entropy, loss


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("z_loss", "smoothing"), [(0, 0), (0.01, 0), (0, 0.2), (0.01, 0.2)])
@pytest.mark.parametrize(("num_devices", "on_gpu"), [(1, False), (1, True), (2, False)])
def test_cross_entropy_and_its_gradient_equal_the_definition(
  monkeypatch, dtype, z_loss, smoothing, num_devices, on_gpu
):
  monkeypatch.setattr(topology, "is_gpu", lambda: on_gpu)
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

  with jax.set_mesh(MeshSpec(ici={"tensor": num_devices}).build(jax.devices()[:num_devices])):
    np.testing.assert_allclose(ours(logits), definition(logits), rtol=2e-5, atol=1e-5)
    got = jax.grad(lambda x: (weights * ours(x)).sum())(logits)
  expected = jax.grad(lambda x: (weights * definition(x)).sum())(logits)
  assert got.dtype == dtype
  np.testing.assert_allclose(
    got.astype(jnp.float32),
    expected.astype(jnp.float32),
    atol=2e-6 if dtype == jnp.float32 else 8e-3,
  )


@pytest.mark.parametrize("special", [[], [-jnp.inf], [jnp.nan], [jnp.inf], [3e38, -3e38]], ids=str)
def test_a_sum_of_exponentials_in_one_pass_is_that_in_two(special):
  logits = 30 * jax.random.normal(jax.random.key(0), (3, 2, 700))
  logits = logits.at[1, 0, : len(special)].set(jnp.array(special))
  one_pass = jax.vmap(lambda logits: loss.one_pass_log_sum_exp(logits, -1))
  np.testing.assert_allclose(one_pass(logits), jax.nn.logsumexp(logits, axis=-1), rtol=1e-6)


def test_a_sum_of_exponentials_in_one_pass_has_the_derivatives_of_that_in_two():
  logits = 3 * jax.random.normal(jax.random.key(0), (2, 9))

  def second(log_sum_exp):
    return jax.hessian(lambda logits: log_sum_exp(logits, -1).sum())(logits)

  got, expected = second(loss.one_pass_log_sum_exp), second(jax.nn.logsumexp)
  np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize(
  "function", [lambda total: total, jax.value_and_grad], ids=["value", "gradient"]
)
def test_devices_add_up_their_chunks_once(function):
  devices = MeshSpec(ici={"fsdp": 4}).build(jax.devices()[:4])
  sharded = NamedSharding(devices, PartitionSpec(None, "fsdp"))
  x = jnp.ones((3, 4, 2, 8), device=sharded)  # [chunks, shards, ...]

  def total(w, x):
    def one(w, x, _):
      return jnp.tanh(x @ w).sum()

    return loss.sum_over_chunks(one, w, x, None, ("fsdp",))

  with jax.set_mesh(devices):
    text = jax.jit(function(total)).lower(jnp.ones((8, 16)), x).compile().as_text() or ""
  found = hlo_collectives.instructions(text, devices)
  assert found and not any(one.in_loop for one in found)
