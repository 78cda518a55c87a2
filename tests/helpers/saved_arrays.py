# SPDX-License-Identifier: Apache-2.0
"""A state of a few arrays, to save and restore."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers.tiny_model import place
from paxlike.layers.stack_layout import Layout

FLAT = Layout(scanned=False, repeats=0)


def arrays(seed=0):
  """A state of small arrays: of each kind, and of several dtypes."""
  random = np.random.default_rng(seed)
  values = random.normal(size=(8, 4))
  return {
    # Too large to be kept with the names.
    "params.table": jnp.array(random.normal(size=(300, 40)), jnp.float32),
    "params.a.w": jnp.array(values, jnp.float32),
    "params.b.w": jnp.array(values, jnp.bfloat16),
    "extra.scale": jnp.array(values, jnp.float8_e4m3fn),
    "opt_state.bits": jnp.array(random.integers(0, 2**32, 5), jnp.uint32),
    "step": jnp.int32(7),
  }


def target_of(state, sharding=None):
  """What a checkpoint of a state is restored to; sharding None: on the first device."""
  sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for n, x in state.items()}


def save(checkpoints, step, state=None, layout=FLAT):
  """Saves a state, by default `arrays()`, and waits until it is committed."""
  checkpoints.save(step, state or arrays(), layout=layout, train_input=place(step))
  checkpoints.wait()


def assert_bitwise(got, expected):
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    assert got[name].dtype == value.dtype, name
    assert np.asarray(got[name]).tobytes() == np.asarray(value).tobytes(), name
