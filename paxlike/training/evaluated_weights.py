# SPDX-License-Identifier: Apache-2.0
"""Computes the weights to evaluate in place of the trained ones: see `Optimizer.evaluated`."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from paxlike.checkpoints.array_names import flatten
from paxlike.checkpoints.warm_start import Derived
from paxlike.devices import mesh as mesh_lib
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params
from paxlike.training import train_state
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState


def derived(
  definition: Definition, optimizer: Optimizer, mesh: Mesh | None = None
) -> dict[str, Derived]:
  """Returns how each weight to evaluate is computed from a training state.

  The result is empty if the trained weights themselves are evaluated. An entry names only the
  arrays that its weight depends on, so that no others are read from a checkpoint.

  Args:
    definition: The model.
    optimizer: The optimizer that trains it.
    mesh: The mesh of the arrays; None: no shardings.

  Raises:
    UserError: `Optimizer.evaluated` returns other names or shapes than those of the weights.
  """
  if optimizer.evaluated is None:
    return {}
  params: Any = {
    name: jax.ShapeDtypeStruct(spec.shape, spec.dtype)
    for name, spec in definition.optimized(definition.weights).items()
  }
  opt_state = jax.eval_shape(optimizer.transformation(definition).init, params)
  given = {"opt_state": opt_state, "params": params}
  if mesh is not None:
    place = functools.partial(_placed, definition, mesh)
    given = jax.tree_util.tree_map_with_path(place, given)

  def evaluated(given: Any) -> Params:
    assert optimizer.evaluated is not None
    return optimizer.evaluated(given["opt_state"], given["params"])

  closed, returned = jax.make_jaxpr(evaluated, return_shape=True)(given)
  shapes = {name: leaf.shape for name, leaf in flatten(returned).items()}
  if shapes != {name: leaf.shape for name, leaf in params.items()}:
    raise UserError("Optimizer.evaluated must return an array for each of the weights it is given.")
  inputs, found = flatten(given), {}
  for name in shapes:
    jaxpr, is_used = partial_eval.dce_jaxpr(closed.jaxpr, [other == name for other in shapes])
    used = [item for item, use in zip(inputs.items(), is_used, strict=True) if use]
    found[name] = Derived(dict(used), functools.partial(_value, ClosedJaxpr(jaxpr, closed.consts)))
  return found


def _value(closed: ClosedJaxpr, arrays: Mapping[str, Any]) -> Any:
  (value,) = jaxpr_as_fun(closed)(*arrays.values())
  return value


def _placed(
  definition: Definition, mesh: Mesh, path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct
) -> jax.ShapeDtypeStruct:
  spec = train_state.weight_of(definition, path, leaf.shape)
  where = NamedSharding(mesh, PartitionSpec())
  if spec is not None:
    where = mesh_lib.sharding(mesh, spec.dims, leaf.shape)
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def of_state(definition: Definition, optimizer: Optimizer, state: TrainState, mesh: Mesh) -> Params:
  """Returns all weights of a training state, with those to evaluate in place of trained ones."""
  weights = state.weights
  if optimizer.evaluated is None:
    return weights
  arrays = flatten({"opt_state": state.opt_state, "params": state.params})
  for name, one in derived(definition, optimizer, mesh).items():
    # Moves arrays that the optimizer keeps on the host, or shards further.
    moved = {n: jax.device_put(arrays[n], leaf.sharding) for n, leaf in one.inputs.items()}
    spec = definition.weights[name]
    where = mesh_lib.sharding(mesh, spec.dims, spec.shape)
    weights[name] = jax.device_put(one.value(moved), where)
  return weights
