# SPDX-License-Identifier: Apache-2.0
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import hlo

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.inference.sampling import Sampling

PROBABILITIES = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = jnp.log(jnp.array(PROBABILITIES))[None]


@pytest.mark.parametrize(
  ("sampling", "allowed"),
  [
    (Sampling(temperature=1.0), 5),
    (Sampling(temperature=1.0, top_k=2), 2),
    (Sampling(temperature=1.0, top_k=9), 5),
    # The set of the likeliest that together have at least this probability.
    (Sampling(temperature=1.0, top_p=0.4), 1),
    (Sampling(temperature=1.0, top_p=0.41), 2),
    (Sampling(temperature=1.0, top_p=0.84), 3),
    (Sampling(temperature=1.0, top_p=1.0), 5),
    (Sampling(temperature=1.0, min_p=0.3), 3),
    (Sampling(temperature=1.0, top_k=4, top_p=0.9, min_p=0.5), 2),
  ],
)
def test_limits_leave_the_likeliest(sampling, allowed):
  left = np.asarray(jnp.isfinite(sampling.limit(LOGITS)))[0]
  assert left.tolist() == [True] * allowed + [False] * (5 - allowed)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
  keys = jax.random.split(jax.random.key(0), 20_000)
  logits = jnp.repeat(LOGITS, len(keys), 0)
  tokens, log_probabilities = Sampling(temperature=temperature).draw(logits, keys)
  expected = PROBABILITIES ** (1 / temperature)
  shares = np.bincount(tokens, minlength=5) / len(keys)
  np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.015)
  # The model's own, whatever the temperature.
  np.testing.assert_allclose(np.exp(log_probabilities), PROBABILITIES[tokens], rtol=1e-5)


@pytest.mark.parametrize("size", [5, 37, 100])
@pytest.mark.parametrize("vary", ["seeds", "positions"])
def test_neighbouring_draws_are_independent(size, vary):
  from scipy import stats  # Slow to import.

  logits = 2 * np.random.default_rng(size).normal(size=size)
  logits[size // 2] = -np.inf
  numbers, pairs = jnp.arange(50_000), jnp.arange(2)
  seeds, positions = (numbers, pairs[:, None]) if vary == "seeds" else (pairs[:, None], numbers)
  fold = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))
  keys = fold(*(x.ravel() for x in jnp.broadcast_arrays(seeds, positions)))
  drawn, _ = Sampling(temperature=1.0).draw(jnp.broadcast_to(logits, (len(keys), size)), keys)
  first, second = np.asarray(drawn).reshape(2, -1)
  shares = np.exp(logits) / np.exp(logits).sum()
  count = np.bincount(first * size + second, minlength=size**2)
  expected = len(first) * np.outer(shares, shares).ravel()
  assert not count[expected == 0].any()
  # Pairs that are too rare for a test of each are counted with the likeliest.
  bins = np.where(expected < 5, expected.argmax(), np.arange(size**2))
  observed, expected = (np.bincount(bins, x, minlength=size**2) for x in (count, expected))
  kept = expected > 0
  assert stats.chisquare(observed[kept], expected[kept]).pvalue > 1e-3


def test_temperature_zero_takes_the_likeliest():
  tokens, _ = Sampling().draw(LOGITS, jax.random.split(jax.random.key(0), 1))
  assert tokens.tolist() == [0]


@pytest.mark.parametrize("size", [1, 2, 5, 64, 1000])
def test_of_equally_likely_tokens_the_first_is_taken(size):
  logits = np.random.default_rng(size).integers(0, 9, (40, size)).astype(np.float32)
  logits[0] = -np.inf
  tokens, _ = Sampling().draw(jnp.array(logits), jax.random.split(jax.random.key(0), 40))
  np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_the_likeliest_of_a_sharded_vocabulary_is_found_without_gathering_logits():
  logits = np.random.default_rng(0).normal(size=(4, 1024)).astype(np.float32)
  devices = MeshSpec(ici=(1, 1, 2)).build(jax.devices()[:2])
  with jax.set_mesh(devices):
    sharded = jax.device_put(logits, jax.NamedSharding(devices, jax.P(None, "tensor")))
    given = sharded, jax.random.split(jax.random.key(0), 4)
    choose = jax.jit(Sampling().choose).lower(*given).compile()
    np.testing.assert_array_equal(choose(*given), logits.argmax(-1))
  moved = [shape for one in hlo.collectives(hlo.text(choose)) for shape in one.outputs]
  assert moved and max(math.prod(shape.dims) for shape in moved) <= 2 * len(logits)


@pytest.mark.parametrize(
  "options", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.1}, {"min_p": 2.0}]
)
def test_nonsense_is_refused(options):
  with pytest.raises(UserError, match=next(iter(options))):
    Sampling(**options)
