# SPDX-License-Identifier: Apache-2.0
"""Steps of a model on a mesh, and when two of them are the same."""

import jax
import numpy as np

from helpers.tiny_model import adamw
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.stack import layout_of
from paxlike.training import train_state
from paxlike.training.train_step import make_train_step

ONE = MeshSpec(ici=(1, 1, 1))


def first_state(definition, optimizer, built):
  """Returns a new state, initialized on one device and then sharded: that compiles once."""
  one = ONE.build(jax.devices()[:1])
  with jax.set_mesh(one):
    state = train_state.create(definition, optimizer, one, seed=1)
  target = train_state.abstract(definition, optimizer, built)
  return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, target))


def steps(definition, spec, data, *, devices=None, num_steps=2, optimizer=None, **options):
  """Returns the state, by one name and layer at a time, and the metrics after `num_steps`."""
  built = spec.build(devices)
  optimizer = optimizer or adamw()
  state = first_state(definition, optimizer, built)
  with jax.set_mesh(built):
    step = jax.jit(make_train_step(definition, optimizer, seed=1, **options), donate_argnums=0)
    placed = {
      name: jax.device_put(x, mesh.sharding(built, ("batch", "time"), x.shape))
      for name, x in data.items()
    }
    for _ in range(num_steps):
      state, metrics = step(state, placed)
  return by_layer(definition, state.params), jax.device_get(metrics), state


def by_layer(definition, params):
  layout = layout_of(definition.module)
  result = {}
  for name, value in jax.device_get(params).items():
    location = layout.locate(name)
    held = zip(location.indexes, location.layers, strict=True) if location else ((0, 0),)
    for index, layer in held:
      template = location.template if location else name
      result[template, layer] = value[index] if location and location.stacked else value
  return result


def one_device(definition, data, **options):
  return steps(definition, ONE, data, devices=jax.devices()[:1], **options)


def assert_same(got, expected, *, atol=2e-5):
  assert got[0].keys() == expected[0].keys()
  for name, value in expected[0].items():
    np.testing.assert_allclose(got[0][name], value, atol=atol, err_msg=str(name))
  for name, (total, weight) in expected[1].items():
    np.testing.assert_allclose(got[1][name][0], total, rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(got[1][name][1], weight, err_msg=name)


def distance(a, b):
  """The largest difference of any weight."""
  return max(np.abs(a[0][name] - b[0][name]).max() for name in a[0])
