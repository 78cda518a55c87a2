# SPDX-License-Identifier: Apache-2.0
"""The base of every layer, and the step from a module to a pure function of a dict of arrays.

Modules are definitions: building one allocates nothing. Its weights are shapes with named dims, and
`Definition` turns the finished tree into the specs of its weights and a way to bind arrays to them.
"""

import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike import ranges
from paxlike.configurable import configurable
from paxlike.layers.quantization import Quantized, Storage
from paxlike.layers.rounding import Prepared, Rounded, Rounding

T = TypeVar("T")
Params = dict[str, jax.Array]

# (weight, gradient) -> weight.
Update = Callable[[jax.Array, jax.Array], jax.Array]
# (key, shape, fan_in) -> float32 array.
Initializer = Callable[[jax.Array, tuple[int, ...], int], jax.Array]


@configurable
def gaussian(
  key: jax.Array, shape: tuple[int, ...], fan_in: int, *, std: ranges.Weight
) -> jax.Array:
  """Draws from N(0, std^2)."""
  del fan_in
  return std * jax.random.normal(key, shape)


@configurable
def gaussian_fan_in(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Draws from N(0, 1 / fan_in) (LeCun et al., 1998)."""
  return jax.random.normal(key, shape) / math.sqrt(fan_in)


@configurable
def zeros(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Returns zeros."""
  del key, fan_in
  return jnp.zeros(shape)


@configurable
def constant(
  key: jax.Array, shape: tuple[int, ...], fan_in: int, *, value: ranges.Finite
) -> jax.Array:
  """Returns `value` everywhere."""
  del key, fan_in
  return jnp.full(shape, value, jnp.float32)


def follow_sign(weight: jax.Array, gradient: jax.Array, *, rate: float) -> jax.Array:
  """An update by a step of the same size for all entries, against the gradient."""
  return weight - rate * jnp.sign(gradient)


class Module(nnx.Module):
  """A layer: sub-layers and weights made in `__init__`, arithmetic in `__call__`."""

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    # NNX's metaclass hides the constructor's signature, without which Fiddle accepts any argument.
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    cls.__signature__ = inspect.Signature(parameters)

  def weight(
    self,
    dims: Mapping[str, int],
    *,
    init: Initializer,
    fan_in: Collection[str] = (),
    compute_dtype: Any = jnp.float32,
    update: Update | None = None,
    storage: Storage | None = None,
    rounding: Rounding | None = None,
    statistic: bool = False,
  ) -> nnx.Param:
    """Declares a float32 weight.

    Args:
      dims: Name -> size of each dim, in order: shape, fan and sharding follow from the names.
      init: How to draw it.
      fan_in: The dims that a product with this weight sums over.
      compute_dtype: What the layer casts it to; `Definition.prepare` does so ahead of time.
      update: How a step changes a weight that is not the optimizer's; None: it is.
      storage: What is held of the weight where it is only read.
      rounding: What is made of it once a step, to multiply with.
      statistic: Whether it is no weight but what a layer noticed in earlier steps. Its gradient is
        what it notices in this one, the largest of those of the parts of a batch.
    """
    shape = jax.ShapeDtypeStruct(tuple(dims.values()), jnp.float32)
    fan = math.prod(dims[dim] for dim in fan_in)
    return nnx.Param(
      shape,
      dims=tuple(dims),
      init=init,
      fan_in=fan,
      compute_dtype=compute_dtype,
      update=update,
      storage=storage,
      rounding=rounding,
      statistic=statistic,
    )

  def statistic(self, dims: Mapping[str, int], *, update: Update) -> nnx.Param:
    """Declares what a layer remembers of earlier steps, zeros at first: see `weight`."""
    return self.weight(dims, init=zeros, update=update, statistic=True)


def is_statistic(path: Any, param: Any) -> bool:
  """Picks from NNX's states what is no weight but a statistic."""
  del path
  return param.statistic


class WeightSpec(NamedTuple):
  """What is known of a weight before it has a value.

  Attributes:
    shape, dtype: Of the weight, between steps.
    dims: Names of its dims.
    init, fan_in: How it is drawn.
    compute_dtype, update, storage, rounding, statistic: See `Module.weight`.
    changes: Whether steps change it.
    is_quantized: Whether it is held in few bits.
  """

  shape: tuple[int, ...]
  dtype: Any
  dims: tuple[str, ...]
  init: Initializer
  fan_in: int
  compute_dtype: Any
  update: Update | None
  storage: Storage | None
  rounding: Rounding | None
  statistic: bool
  changes: bool
  is_quantized: bool

  @property
  def trained(self) -> bool:
    """Whether an optimizer changes it, and not its own update."""
    return self.changes and self.update is None

  @property
  def stored_dtype(self) -> Any:
    """The dtype that it is held in: frozen weights need no more than is computed.

    Of a quantized weight, the dtype that it is quantized from.
    """
    return self.dtype if self.changes or self.is_quantized else self.compute_dtype

  def stored(self, weight: jax.Array) -> Any:
    """Returns what is held of a weight in `stored_dtype`."""
    return self.storage(weight) if self.storage is not None and self.is_quantized else weight


class Definition:
  """A module tree split once into flat, dotted weight names and everything that is not a weight.

  Attributes:
    module: The tree itself, its weights abstract.
    weights: Name -> spec, such as "stack.layers.3.attention.query.w".
  """

  def __init__(
    self,
    module: nnx.Module,
    *,
    trained: str = "",
    dtype: Any = jnp.float32,
    read_only: bool = False,
  ):
    """`trained` is a pattern (`re.search`) of the names of weights that steps change.

    `dtype` is what an optimizer's weights are held in between steps. If `read_only` there will be
    no steps: every weight that has a storage is held by it.
    """
    self.module = module
    self._graph, state = nnx.split(module)
    self._paths: dict[str, tuple[Any, ...]] = {}
    self.weights: dict[str, WeightSpec] = {}
    for path, param in nnx.to_flat_state(state):
      name = ".".join(map(str, path))
      value = param.get_value()
      changes = param.statistic or re.search(trained, name) is not None
      self._paths[name] = path
      self.weights[name] = WeightSpec(
        value.shape,
        jnp.dtype(dtype) if param.update is None else value.dtype,
        param.dims,
        param.init,
        param.fan_in,
        param.compute_dtype,
        param.update,
        param.storage,
        param.rounding,
        param.statistic,
        changes,
        param.storage is not None and (read_only or not changes),
      )

  @property
  def num_params(self) -> int:
    """The number of scalars in the weights, without those that no gradient is for."""
    return sum(math.prod(spec.shape) for spec in self.weights.values() if spec.update is None)

  @property
  def num_trained(self) -> int:
    """The number of scalars in the weights that an optimizer trains."""
    return sum(math.prod(spec.shape) for spec in self.optimized(self.weights).values())

  @property
  def num_quantized(self) -> int:
    """The number of scalars in the weights that are held in few bits."""
    return sum(math.prod(spec.shape) for spec in self.weights.values() if spec.is_quantized)

  @property
  def statistics(self) -> list[str]:
    """The names of what is no weight but remembered of earlier steps."""
    return [name for name, spec in self.weights.items() if spec.statistic]

  @property
  def frozen(self) -> list[str]:
    """The names of the weights that no step changes."""
    return [name for name, spec in self.weights.items() if not spec.changes]

  def optimized(self, values: Mapping[str, T]) -> dict[str, T]:
    """Returns what of `values`, by weight, is of those that an optimizer trains."""
    return {name: v for name, v in values.items() if self.weights[name].trained}

  def prepare(self, params: Mapping[str, jax.Array]) -> Params:
    """Returns `params` in the dtypes that the layers compute with: once a step, not once a use."""
    return {
      name: w if isinstance(w, Quantized) else w.astype(self.weights[name].compute_dtype)
      for name, w in params.items()
    }

  def rounded(self, prepared: Mapping[str, jax.Array]) -> dict[str, Rounded]:
    """Returns what layers multiply with in the place of weights: once a step, not once a use."""
    given = {name: self.weights[name].rounding for name in prepared}
    return {
      name: rounding(prepared[name])
      for name, rounding in given.items()
      if rounding is not None and not isinstance(prepared[name], Quantized)
    }

  def bind(self, params: Mapping[str, Any], rounded: Mapping[str, Rounded] | None = None) -> Any:
    """Returns the module with `params` as its weights. Free inside a traced function.

    What is not `rounded` already, layers round themselves.
    """
    values = dict(params)
    for name, small in (rounded or {}).items():
      values[name] = Prepared(values[name], small)
    flat = [(self._paths[name], value) for name, value in values.items()]
    return nnx.merge(self._graph, nnx.from_flat_state(flat))
