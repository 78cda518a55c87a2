# SPDX-License-Identifier: Apache-2.0
"""The training state: its shapes, its shardings and its initialization."""

import dataclasses
import functools
import zlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from paxlike.devices import mesh as mesh_lib
from paxlike.devices import xla_flags
from paxlike.errors import UserError
from paxlike.layers import module
from paxlike.layers.module import Definition, Params, WeightSpec
from paxlike.layers.stack import layout_of
from paxlike.layers.stack_layout import Layout
from paxlike.training.optimizers import Optimizer

T = TypeVar("T")
_PADDING = -1  # Of a stack's leading dim, in place of a layer.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
  """The state that a step takes, donates and returns.

  Attributes:
    step: int32, completed steps.
    params: Trained weights, in the definition's storage dtype.
    frozen: Frozen weights, in their compute dtypes or quantized; not in checkpoints.
    reference: The weights of the reference model in their compute dtypes, if the objective needs
      one; not in checkpoints.
    extra: Non-trainable state of layers (amax histories).
    opt_state: The optimizer's state.
    skipped: int32, the steps among `step` whose update was skipped: it was not finite, or the guard
      found a spike.
    guard: The state of the optimizer's guard, if it has one.
  """

  step: jax.Array
  params: Params
  frozen: Params
  reference: Params
  extra: dict[str, jax.Array]
  opt_state: Any
  skipped: jax.Array
  guard: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

  @property
  def weights(self) -> Params:
    """All weights that a model is bound to."""
    return self.params | self.frozen | self.extra


def abstract(
  definition: Definition,
  optimizer: Optimizer,
  mesh: Mesh | AbstractMesh,
  *,
  reference: Definition | None = None,
) -> Any:
  """Returns a TrainState of shapes, dtypes and shardings; `reference` is the reference model."""
  weights = _abstract_weights(definition)
  params, frozen, extra = split(definition, weights)
  count: Any = jax.ShapeDtypeStruct((), jnp.int32)
  state = TrainState(
    step=count,
    params=params,
    frozen=frozen,
    reference=(
      {} if reference is None else jax.eval_shape(reference.prepare, _abstract_weights(reference))
    ),
    extra=extra,
    opt_state=jax.eval_shape(
      optimizer.transformation(definition).init, definition.optimized(params)
    ),
    skipped=count,
    guard={} if optimizer.guard is None else jax.eval_shape(optimizer.guard.init),
  )

  def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    owner = (path[0].name == "reference" and reference) or definition
    spec = weight_of(owner, path, leaf.shape)
    partition = PartitionSpec()
    if spec is not None:
      partition = mesh_lib.partition(spec.dims, leaf.shape, mesh.shape)
      if optimizer.over_data and path[0].name == "opt_state":
        partition = mesh_lib.shard_over_data(partition, leaf.shape, mesh.shape)
    sharding = NamedSharding(mesh, partition)
    if optimizer.on_host and path[0].name == "opt_state" and leaf.shape:
      sharding = sharding.with_memory_kind("pinned_host")
      if sharding.memory_kind is None:  # JAX drops memory kinds for GPUs that are not attached.
        raise UserError(
          "OPTIMIZER_ON_HOST: JAX cannot compile for the host memory of GPUs that are not attached."
          " Leave it out, or compile on a machine that has the GPUs."
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

  return jax.tree_util.tree_map_with_path(place, state)


def _abstract_weights(definition: Definition) -> Any:
  return {name: spec.abstract for name, spec in definition.weights.items()}


def weight_of(
  definition: Definition, path: tuple[Any, ...], shape: tuple[int, ...]
) -> WeightSpec | None:
  """Returns the spec of the weight that an array of a state is sharded like; None: replicated.

  An array belongs to the weight that a key in its path names, if it has as many dims. So optimizer
  moments, which are dicts keyed by weight name, are sharded like the weights.
  """
  keys = [getattr(key, "key", None) for key in path]
  spec = next((definition.weights[key] for key in keys if key in definition.weights), None)
  return spec if spec is not None and len(spec.shape) == len(shape) else None


def with_same_shardings(
  definition: Definition, optimizer: Optimizer, state: TrainState
) -> TrainState:
  """Constrains a new state, inside a traced function, to the shardings of the old state."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or (mesh.size == 1 and not optimizer.on_host):
    return state
  target = abstract(definition, optimizer, mesh)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
  on_device = jax.tree.map(lambda sharding: sharding.with_memory_kind("device"), shardings)
  unchanged = {"frozen": {}, "reference": {}}
  changing = dataclasses.replace(state, **unchanged)
  changing = jax.lax.with_sharding_constraint(changing, dataclasses.replace(on_device, **unchanged))
  if optimizer.on_host:
    opt_state = jax.device_put(changing.opt_state, shardings.opt_state)
    changing = dataclasses.replace(changing, opt_state=opt_state)
  return dataclasses.replace(changing, frozen=state.frozen, reference=state.reference)


def create(
  definition: Definition,
  optimizer: Optimizer,
  mesh: Mesh,
  *,
  seed: int,
  given: Mapping[str, jax.Array] | None = None,
) -> TrainState:
  """Returns the state before the first step, each array created with its sharding.

  Weights in `given` are used as they are; the others are initialized by `init_params`.
  """
  target = abstract(definition, optimizer, mesh)
  weights = init_params(definition, mesh, seed=seed, given=given)
  params, frozen, extra = split(definition, weights)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, target)
  transform = optimizer.transformation(definition)

  def init(params: Params) -> tuple[Any, dict[str, jax.Array]]:
    return transform.init(params), {} if optimizer.guard is None else optimizer.guard.init()

  where = shardings.opt_state, shardings.guard
  options = xla_flags.initialization_options()
  jitted = jax.jit(init, out_shardings=where, compiler_options=options)
  opt_state, guard = jitted(definition.optimized(params))
  zero = functools.partial(jnp.zeros, (), jnp.int32, device=target.step.sharding)
  return TrainState(
    step=zero(),
    params=params,
    frozen=frozen,
    reference={},
    extra=extra,
    opt_state=opt_state,
    skipped=zero(),
    guard=guard,
  )


def split(
  definition: Definition, weights: Mapping[str, T]
) -> tuple[dict[str, T], dict[str, T], dict[str, T]]:
  """Returns (trained weights, frozen weights, non-trainable state)."""
  parts: tuple[dict[str, T], ...] = ({}, {}, {})
  for name, weight in weights.items():
    spec = definition.weights[name]
    parts[2 if spec.statistic else 0 if spec.changes else 1][name] = weight
  return parts[0], parts[1], parts[2]


def init_params(
  definition: Definition,
  mesh: Mesh,
  *,
  seed: int,
  given: Mapping[str, jax.Array] | None = None,
  names: Collection[str] | None = None,
) -> Params:
  """Initializes the weights that are not `given`, each with a key from (seed, name, layer).

  Initial weights are then the same in every layout and on every mesh, and adding a weight changes
  no other. `names` selects weights; None: all. It is not to be traced: it gives XLA options.
  """
  layout = layout_of(definition.module)
  given = given or {}
  wanted = definition.weights if names is None else names
  specs = {name: definition.weights[name] for name in wanted}
  sources = {name: _source(name, specs[name], layout) for name in specs if name not in given}
  keys = _keys(seed, sources, mesh)
  params: Params = {}
  for name, spec in specs.items():
    if name in given:
      params[name] = given[name]
    else:
      draw = _drawing(spec, sources[name], mesh)
      params[name] = spec.stored(draw(keys[name], sources[name].layers))
  return params


def trace_init(definition: Definition, mesh: Mesh):
  """Traces the initializer of each weight, so that its errors appear early."""
  key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
  layout = layout_of(definition.module)
  for name, spec in definition.weights.items():
    source = _source(name, spec, layout)
    keys = jax.ShapeDtypeStruct((len(source.layers), *key.shape), key.dtype)
    _drawing(spec, source, mesh).eval_shape(keys, source.layers)


class _Source(NamedTuple):
  """What the keys of a weight are made of.

  Attributes:
    code: A hash of the weight's template.
    layers: The layers that it holds, int32; `_PADDING` in place of none.
    stacked: Whether it has a leading dim of layers.
  """

  code: int
  layers: np.ndarray
  stacked: bool


def _source(name: str, spec: WeightSpec, layout: Layout) -> _Source:
  location = layout.locate(name)
  template, layers = (location.template, location.layers) if location else (name, (0,))
  if location and spec.padding:
    held = dict(zip(location.indexes, location.layers, strict=True))
    layers = tuple(held.get(index, _PADDING) for index in range(spec.shape[0]))
  stacked = location is not None and location.stacked
  return _Source(zlib.crc32(template.encode()), np.array(layers, np.int32), stacked)


def _keys(seed: int, sources: Mapping[str, _Source], mesh: Mesh) -> dict[str, np.ndarray]:
  """Returns the data of the keys of each weight, a row for each of its layers.

  One program makes them all. In the program of each weight, its keys would take a third of the
  compilation. The number of keys is rounded up, so that most models share the program.
  """
  if not sources:
    return {}
  rows = [(source.code, layer) for source in sources.values() for layer in source.layers]
  table = np.zeros((max(64, 1 << len(rows).bit_length()), 2), np.int64)
  table[: len(rows)] = np.reshape(rows, (-1, 2))
  codes, layers = table[:, 0].astype(np.uint32), table[:, 1].astype(np.int32)
  data = iter(np.asarray(_key_program(mesh)(jax.random.key(seed), codes, layers)))
  return {name: np.stack([next(data) for _ in source.layers]) for name, source in sources.items()}


@functools.cache
def _key_program(mesh: Mesh):
  """Returns the jitted fold(root key, codes[N], layers[N]): the data of N keys."""

  def fold(root: jax.Array, code: jax.Array, layer: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.fold_in(root, code), layer)
    return jax.random.key_data(key)

  return jax.jit(
    jax.vmap(fold, (None, 0, 0)),
    out_shardings=NamedSharding(mesh, PartitionSpec()),  # Each process reads all.
    compiler_options=xla_flags.initialization_options(),
  )


def _drawing(spec: WeightSpec, source: _Source, mesh: Mesh) -> Any:
  """Returns draw(data of keys, layers), which initializes a weight."""
  return _drawer(
    _hashable(spec.init),
    spec.shape,
    spec.fan_in,
    spec.stored_dtype,
    source.stacked,
    spec.padding > 0,
    mesh_lib.sharding(mesh, spec.dims, spec.shape),
  )


@functools.cache
def _drawer(
  init: Any,
  shape: tuple[int, ...],
  fan_in: int,
  dtype: Any,
  stacked: bool,
  padded: bool,
  where: NamedSharding,
):
  """Returns the jitted initializer (see `_drawing`), shared by weights with equal arguments."""
  function, keywords = init

  def one(key: jax.Array, layer: jax.Array) -> jax.Array:
    per_layer = shape[1:] if stacked else shape
    drawn = function(key, per_layer, fan_in, **dict(keywords))
    if padded:  # Zeros stay zeros: they get no gradient.
      drawn = jnp.where(layer == _PADDING, 0, drawn)
    return drawn.astype(dtype)

  def draw(data: jax.Array, layers: jax.Array) -> jax.Array:
    keys = jax.random.wrap_key_data(data)
    return jax.vmap(one)(keys, layers) if stacked else one(keys[0], layers[0])

  options = xla_flags.initialization_options()
  return jax.jit(draw, out_shardings=where, compiler_options=options)


def _hashable(init: module.Initializer) -> tuple[Any, tuple[tuple[str, Any], ...]]:
  """Returns a hashable form of an initializer; `functools.partial` compares by identity."""
  if isinstance(init, functools.partial) and not init.args:
    inner: dict[str, Any] = {
      name: _Inner(*_hashable(x)) if isinstance(x, functools.partial) else x
      for name, x in init.keywords.items()
    }
    return init.func, tuple(sorted(inner.items()))
  return init, ()


@dataclasses.dataclass(frozen=True)
class _Inner:
  """An initializer that is an argument of another, in its hashable form."""

  function: Any
  keywords: tuple[tuple[str, Any], ...]

  def __call__(self, *args: Any) -> jax.Array:
    return self.function(*args, **dict(self.keywords))
