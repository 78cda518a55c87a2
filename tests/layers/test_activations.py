# SPDX-License-Identifier: Apache-2.0
"""Activations in bfloat16 are rounded once."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike import layers
from paxlike.layers.activations import activate, gelu


def silu(x):
  return x / (1 + np.exp(-x))


def exact_gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
  "activation, exact",
  [
    (gelu, exact_gelu),
    (layers.swiglu, lambda gate, up: silu(gate) * up),
    (layers.geglu, lambda gate, up: exact_gelu(gate) * up),
    (jax.nn.silu, silu),
    (
      functools.partial(layers.clamped_swiglu, alpha=1.0, limit=1.501),
      lambda gate, up: silu(np.minimum(gate, 1.501)) * (np.clip(up, -1.501, 1.501) + 1),
    ),
  ],
)
def test_values_and_gradients_are_rounded_once(activation, exact):
  num_inputs = exact.__code__.co_argcount
  random: Any = np.random.default_rng(0)
  inputs = [jnp.asarray(random.normal(size=(64, 128)) * 2, jnp.bfloat16) for _ in range(num_inputs)]
  y, back = jax.vjp(lambda *given: activate(activation, *given), *inputs)
  exact_inputs = [np.asarray(x, np.float64) for x in inputs]
  found, expected = [y], [exact(*exact_inputs)]
  for place in range(num_inputs):
    low, high = ([x - (n == place) * h for n, x in enumerate(exact_inputs)] for h in (1e-6, -1e-6))
    expected.append((exact(*high) - exact(*low)) / 2e-6)
  found += back(jnp.ones_like(y))
  for one, wanted in zip(found, expected, strict=True):
    assert one.dtype == jnp.bfloat16
    # bfloat16 has 8 significant bits: rounded once, it is off by less than 2**-8. Near zero,
    # float32 itself cancels.
    np.testing.assert_allclose(np.asarray(one, np.float64), wanted, rtol=2**-8, atol=1e-4)
