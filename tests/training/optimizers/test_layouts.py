# SPDX-License-Identifier: Apache-2.0
"""Each optimizer makes the same updates on any mesh and in any layout of the layers."""

import collections
import functools
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jaxprs
from helpers.shrunk import shrunk

from paxlike import layers
from paxlike.checkpoints import array_names
from paxlike.devices import mesh
from paxlike.devices.mesh import MeshSpec
from paxlike.experiments.gpt import Gpt3_52k
from paxlike.layers.stack import layout_of
from paxlike.layers.stack_layout import Layout
from paxlike.training import optimizers, train_state
from paxlike.training.optimizers import newton_schulz

NAMES = [name for name, make in optimizers.OPTIMIZERS.items() if make is None]
MESHES = (
  {"data": 2, "fsdp": 2, "tensor": 2},
  {"fsdp": 8},
  {"data": 8},
  {"pipeline": 2, "fsdp": 2, "tensor": 2},
  {"expert": 2, "fsdp": 2, "context": 2},
)


def optimizer_of(name: str, **knobs: Any) -> optimizers.Optimizer:
  experiment = Gpt3_52k(OPTIMIZER=name, LEARNING_RATE=0.1, LR_SCHEDULE="constant", **knobs)
  return fdl.build(experiment.optimizer())


@functools.cache
def model(*, scan: bool = True) -> layers.Definition:
  """Four layers with groups of key heads and experts."""
  return shrunk("Mixtral8x7B", scan=scan, repeats=4)


def random_like(definition: layers.Definition, seed: int) -> dict[str, Any]:
  random = np.random.default_rng(seed)
  return {
    name: random.normal(size=spec.shape).astype(np.float32)
    for name, spec in definition.optimized(definition.weights).items()
  }


def trained(definition, optimizer, sizes: dict[str, int], *, updates: int = 3) -> dict[str, Any]:
  """The weights after updates with random gradients."""
  devices = jax.devices()[: int(np.prod(list(sizes.values())))]
  built = MeshSpec(ici=sizes).build(devices)
  transform = optimizer.transformation(definition)
  with jax.set_mesh(built):
    state: Any = train_state.create(definition, optimizer, built, seed=0).opt_state
    places = {
      name: mesh.sharding(built, spec.dims, spec.shape)
      for name, spec in definition.optimized(definition.weights).items()
    }
    params: Any = jax.device_put(random_like(definition, 0), places)
    update = jax.jit(transform.update)
    for seed in range(1, updates + 1):
      gradients: Any = jax.device_put(random_like(definition, seed), places)
      changes, state = update(gradients, state, params)
      params = jax.tree.map(jnp.add, params, changes)
  return jax.tree.map(np.asarray, params)


@functools.cache
def on_one(name: str) -> dict[str, Any]:
  return trained(model(), optimizer_of(name), {"data": 1})


def assert_same(got: dict[str, Any], expected: dict[str, Any]):
  for weight, value in expected.items():
    np.testing.assert_allclose(got[weight], value, rtol=1e-5, atol=1e-5, err_msg=weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_makes_the_same_updates_on_eight_devices(name):
  assert_same(trained(model(), optimizer_of(name), MESHES[0]), on_one(name))


def by_layer(tree: Any, layout: Layout) -> dict[tuple[str, int], Any]:
  """(template, layer) -> array, which does not depend on the layout."""
  found = {}
  for name, x in array_names.flatten(tree).items():
    location = layout.locate(name)
    if location is None:
      found[name, 0] = x
    elif location.stacked:
      found |= {(location.template, i): x[i] for i in location.layers}
    else:
      found[location.template, location.layers[0]] = x
  return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_treats_stacked_layers_as_single_ones(name):
  """Its state, too: a checkpoint can be converted between both."""
  stacked, single = model(), model(scan=False)
  ends = []
  for definition in (stacked, single):
    layout = layout_of(definition.module)
    transform = optimizer_of(name).transformation(definition)
    arrays = []
    for seed in range(4):
      drawn = by_layer(random_like(stacked, seed), layout_of(stacked.module))
      arrays.append(_in_layout(drawn, definition, layout))
    params, state, update = arrays[0], transform.init(arrays[0]), jax.jit(transform.update)
    for gradients in arrays[1:]:
      changes, state = update(gradients, state, params)
      params = jax.tree.map(jnp.add, params, changes)
    ends.append(by_layer({"params": params, "state": state}, layout))
  assert_same(ends[1], ends[0])
  assert ends[1].keys() == ends[0].keys()


def _in_layout(drawn: dict[tuple[str, int], Any], definition, layout: Layout) -> dict[str, Any]:
  """Inverts `by_layer` for the weights of a model."""
  arrays = {}
  for name in definition.optimized(definition.weights):
    location = layout.locate(name)
    if location is None:
      arrays[name] = drawn[name, 0]
    else:
      layers_of = [drawn[location.template, layer] for layer in location.layers]
      arrays[name] = np.stack(layers_of) if location.stacked else layers_of[0]
  return arrays


@pytest.mark.slow
@pytest.mark.parametrize(
  ("sizes", "over_data"),
  [
    *((sizes, False) for sizes in MESHES[1:]),
    *((sizes, True) for sizes in MESHES if "data" in sizes),
  ],
)
def test_muon_makes_the_same_updates_on_any_mesh(sizes, over_data):
  optimizer = optimizer_of("muon", SHARD_OPTIMIZER_OVER_DATA=over_data)
  assert_same(trained(model(), optimizer, sizes), on_one("muon"))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_each_matrix_is_orthogonalized_once_on_a_mesh(sizes):
  """But for the padding of a group of matrices to a multiple of the devices."""
  definition, optimizer = model(), optimizer_of("muon")
  built, transform = MeshSpec(ici=sizes).build(), optimizer.transformation(definition)
  with jax.set_mesh(built):
    params: Any = random_like(definition, 0)
    traced = jax.make_jaxpr(transform.update)(params, transform.init(params), params)
  found = [e for e, _ in jaxprs.equations(traced.jaxpr)]
  products = [e for e in found if e.primitive.name == "dot_general"]
  here = 0.0
  for product in products:  # JAX drops a batch of one.
    (_, _), (batch, _) = product.params["dimension_numbers"]
    here += product.invars[0].aval.shape[batch[0]] if batch else 1
  here /= 3 * 5  # Matmuls of each of five iterations.
  counts = collections.Counter()
  for spec in definition.optimized(definition.weights).values():
    if (how := newton_schulz.matrix(spec)) is not None:
      shape = tuple(sorted((how.num_inputs, how.num_outputs)))
      counts[shape] += int(np.prod(spec.shape[: how.batch]))
  # Groups also differ by their sharding, so that there may be a few more than shapes.
  assert sum(counts.values()) / 8 <= here <= sum(counts.values()) / 8 + 2 * len(counts), counts
  assert here < sum(counts.values()) / 2
