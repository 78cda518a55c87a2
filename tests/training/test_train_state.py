# SPDX-License-Identifier: Apache-2.0
import zlib

import jax
import numpy as np
import pytest
from helpers.tiny_model import adamw, tiny

from paxlike.devices import mesh, xla_flags
from paxlike.devices.mesh import MeshSpec
from paxlike.layers.stack import layout_of
from paxlike.training import train_state


def drawn(definition, spec, devices=None):
  params = train_state.init_params(definition, spec.build(devices), seed=3)
  layout = layout_of(definition.module)
  result = {}
  for name, value in jax.device_get(params).items():
    location = layout.locate(name)
    for index, layer in enumerate(location.layers if location else (0,)):
      stacked = location is not None and location.stacked
      result[location.template if location else name, layer] = value[index] if stacked else value
  return result


@pytest.mark.slow
def test_weights_are_the_same_in_every_layout_and_on_every_mesh():
  one = drawn(tiny(num_layers=3), MeshSpec(ici=(1, 1, 1)), jax.devices()[:1])
  for scan, ici in [(True, (1, 4, 2)), (False, (2, 2, 2))]:
    other = drawn(tiny(num_layers=3, scan=scan), MeshSpec(ici=ici))
    assert other.keys() == one.keys()
    for name, value in one.items():
      np.testing.assert_array_equal(other[name], value, err_msg=str(name))


def test_a_deeper_model_begins_with_the_same_layers_and_no_two_are_alike():
  spec, devices = MeshSpec(ici=(1, 1, 1)), jax.devices()[:1]
  shallow, deep = drawn(tiny(), spec, devices), drawn(tiny(num_layers=3), spec, devices)
  for name, value in shallow.items():
    np.testing.assert_array_equal(deep[name], value)
  weights = [value.tobytes() for (name, _), value in deep.items() if name.endswith(".w")]
  assert len(set(weights)) == len(weights)


@pytest.mark.parametrize("scan", [False, True])
def test_a_weight_is_drawn_from_the_seed_its_name_and_its_layer(scan):
  definition = tiny(num_layers=3, scan=scan)
  specs = {}
  for name, spec in definition.weights.items():
    location = layout_of(definition.module).locate(name)
    specs[location.template if location else name] = spec
  for (name, layer), value in drawn(definition, MeshSpec(ici=(2, 2, 2))).items():
    key = jax.random.fold_in(jax.random.key(3), zlib.crc32(name.encode()))
    alone = specs[name].init(jax.random.fold_in(key, layer), value.shape, specs[name].fan_in)
    np.testing.assert_allclose(value, alone, rtol=1e-6, atol=1e-7, err_msg=name)


def test_weights_have_the_spread_asked_for():
  params = drawn(tiny(), MeshSpec(ici=(1, 1, 1)), jax.devices()[:1])
  for (name, _), value in params.items():
    if name.rsplit(".", 1)[-1] in ("w", "table"):
      assert abs(value.std() / 0.1 - 1) < 0.1, name
    else:
      assert not value.any(), name


@pytest.mark.parametrize("scan", [False, True])
def test_the_optimizer_state_lives_where_its_weights_live(scan):
  built = MeshSpec(ici=(2, 2, 2)).build()
  definition = tiny(scan=scan)
  state = train_state.abstract(definition, adamw(), built)
  adam = state.opt_state[1]
  for name, spec in definition.weights.items():
    where = mesh.sharding(built, spec.dims, spec.shape)
    assert state.params[name].sharding == where
    assert adam.mu[name].sharding == adam.nu[name].sharding == where
  assert any(not x.sharding.is_fully_replicated for x in state.params.values())


def test_the_options_of_initializations_change_weights_by_rounding_alone(monkeypatch):
  spec, devices = MeshSpec(ici=(1, 1, 1)), jax.devices()[:1]
  without = drawn(tiny(), spec, devices)
  monkeypatch.setenv("XLA_FLAGS", "")
  assert xla_flags.initialization_options()
  train_state._drawer.cache_clear()
  train_state._key_program.cache_clear()
  try:
    for name, value in drawn(tiny(), spec, devices).items():
      np.testing.assert_allclose(value, without[name], rtol=1e-5, atol=1e-7)
  finally:
    train_state._drawer.cache_clear()
    train_state._key_program.cache_clear()
