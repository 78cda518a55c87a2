# SPDX-License-Identifier: Apache-2.0
"""The base class of layers, and `Definition`, which separates a module tree from its weights.

Building a module allocates nothing: its weights are abstract shapes with named dims. `Definition`
maps flat weight names to specs, and binds arrays to the tree.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from paxlike.config import constructors, ranges
from paxlike.config.configurable import configurable
from paxlike.layers.precision.matmul import Dot
from paxlike.layers.precision.rounding import QuantizedOperand
from paxlike.layers.precision.weight_only import Quantized, WeightQuantizer

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
def scaled(
  key: jax.Array, shape: tuple[int, ...], fan_in: int, *, init: Initializer, by: ranges.Finite
) -> jax.Array:
  """Draws by `init`, and multiplies by a number."""
  return by * init(key, shape, fan_in)


@configurable
def zeros(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Returns zeros."""
  del key, fan_in
  return jnp.zeros(shape)


def ones(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
  """Returns ones."""
  del key, fan_in
  return jnp.ones(shape)


@configurable
def constant(
  key: jax.Array, shape: tuple[int, ...], fan_in: int, *, value: ranges.Finite
) -> jax.Array:
  """Returns `value` everywhere."""
  del key, fan_in
  return jnp.full(shape, value, jnp.float32)


class Matmul(NamedTuple):
  """The matmul of a layer's input and a weight.

  Attributes:
    inputs: The numbers per token that it reads: its contracted width, times top-k for experts.
    outputs: The numbers per token that it writes.
    share: The fraction of the weight that a token uses: top-k / E for experts.
    role: The role by which remat policies can save its output; empty: they cannot.
    operands: The format of its operands, "fp8" or "int8"; None: the compute dtype.
  """

  inputs: int
  outputs: int
  share: float = 1
  role: str = ""
  operands: str | None = None


def follow_sign(weight: jax.Array, gradient: jax.Array, *, rate: float) -> jax.Array:
  """Returns weight - rate * sign(gradient)."""
  return weight - rate * jnp.sign(gradient)


def kept(weight: jax.Array, gradient: jax.Array) -> jax.Array:
  """Returns the weight: no step changes it."""
  del gradient
  return weight


class Module(nnx.Module):
  """A layer: `__init__` declares sub-layers and weights, `__call__` computes."""

  def __init_subclass__(cls, **kwargs: Any):
    super().__init_subclass__(**kwargs)
    # NNX's metaclass hides the constructor's signature; without one, Fiddle accepts any argument.
    cls.__signature__ = constructors.signature(cls)

  def weight(
    self,
    dims: Mapping[str, int],
    *,
    init: Initializer,
    fan_in: Collection[str] = (),
    matmul: Matmul | None = None,
    compute_dtype: Any = jnp.float32,
    update: Update | None = None,
    quantizer: WeightQuantizer | None = None,
    statistic: bool = False,
  ) -> nnx.Param:
    """Declares a float32 weight.

    Args:
      dims: Name -> size of each dim, in order; they give shape, fan-in and sharding.
      init: The initializer.
      fan_in: The dims that a matmul with this weight contracts.
      matmul: That matmul, for the counting of FLOPs and activations; None: there is none.
      compute_dtype: The layer casts the weight to it; `Definition.prepare` does so once per step.
      update: The update rule that replaces the optimizer; None: the optimizer trains the weight.
      quantizer: The weight-only quantization, applied if the weight is frozen.
      statistic: Whether this is non-trainable state (an amax history). Its "gradient" is this
        step's new value, combined over microbatches by maximum.
    """
    shape = jax.ShapeDtypeStruct(tuple(dims.values()), jnp.float32)
    fan = math.prod(dims[dim] for dim in fan_in)
    return nnx.Param(
      shape,
      dims=tuple(dims),
      init=init,
      fan_in=fan,
      contracted=tuple(fan_in),
      matmul=matmul,
      compute_dtype=compute_dtype,
      update=update,
      quantizer=quantizer,
      statistic=statistic,
      padding=0,
    )

  def statistic(self, dims: Mapping[str, int], *, update: Update) -> nnx.Param:
    """Declares non-trainable state, initialized to zeros; see `weight`."""
    return self.weight(dims, init=zeros, update=update, statistic=True)

  def operand(self, weight: str, dot: Dot, *, num_dims: int) -> "OperandVariable":
    """Declares the quantized form of a weight, which `dot` reads.

    Args:
      weight: The name of the weight.
      dot: Quantizes the weight as a matrix [D, F].
      num_dims: How many of its last dims are flattened to D and F; dims before them are stacked.
    """
    return OperandVariable(None, weight=weight, dot=dot, num_dims=num_dims, statistic=False)


class OperandVariable(nnx.Variable):
  """The quantized operand of a low-precision matmul; None: each matmul quantizes the weight."""


def is_statistic(path: Any, param: Any) -> bool:
  """An NNX filter for non-trainable state."""
  del path
  return param.statistic


@dataclasses.dataclass(frozen=True)
class WeightSpec:
  """The static description of a weight.

  Attributes:
    shape: The shape.
    dtype: The storage dtype if the weight is not frozen; see `stored_dtype`.
    dims: The names of the dims; "layer" comes first if the weight is stacked.
    contracted: The dims that a matmul with it contracts, such as ("heads", "head"); may be empty.
    init, fan_in: The initializer and its fan-in argument.
    compute_dtype, update, quantizer, statistic: See `Module.weight`.
    changes: Whether training steps change it; a weight that does not change is frozen.
    is_quantized: Whether it is stored weight-only quantized.
    matmul: See `Module.weight`.
    padding: How many indexes of the dim "layer" hold no layer.
  """

  shape: tuple[int, ...]
  dtype: Any
  dims: tuple[str, ...]
  contracted: tuple[str, ...]
  init: Initializer
  fan_in: int
  compute_dtype: Any
  update: Update | None
  quantizer: WeightQuantizer | None
  statistic: bool
  changes: bool
  is_quantized: bool
  matmul: Matmul | None
  padding: int = 0

  @property
  def size(self) -> int:
    """The number of elements, without padding."""
    size = math.prod(self.shape)
    return size // self.shape[0] * (self.shape[0] - self.padding) if self.padding else size

  @property
  def flops(self) -> float:
    """Forward FLOPs per token of its matmul, over all layers that are stacked in it."""
    return 0 if self.matmul is None else 2 * self.size * self.matmul.share

  @property
  def ndim(self) -> int:
    """The number of dims."""
    return len(self.dims)

  @property
  def trained(self) -> bool:
    """Whether the optimizer trains it (a weight with an `update` rule is not)."""
    return self.changes and self.update is None

  @property
  def stored_dtype(self) -> Any:
    """The storage dtype; frozen weights are stored in their compute dtype.

    For a quantized weight, the dtype before quantization.
    """
    return self.dtype if self.changes or self.is_quantized else self.compute_dtype

  @property
  def abstract(self) -> Any:
    """The shapes and dtypes of its stored form."""
    weight = jax.ShapeDtypeStruct(self.shape, self.stored_dtype)
    # Without a quantizer, `stored` returns its argument, and need not be traced.
    return jax.eval_shape(self.stored, weight) if self.is_quantized else weight

  def stored(self, weight: jax.Array) -> Any:
    """Returns the stored form of a weight in `stored_dtype`: quantized if `is_quantized`."""
    return self.quantizer(weight) if self.quantizer is not None and self.is_quantized else weight


class Definition:
  """A module tree, split into weights with flat dotted names and an NNX graph definition.

  Attributes:
    module: The module tree, with abstract weights.
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
    """Splits a module.

    Args:
      module: The tree.
      trained: A regular expression (`re.search`) for the names of the trained weights.
      dtype: The storage dtype of trained weights.
      read_only: Whether nothing is trained; every weight with a `quantizer` is then quantized.
    """
    self.module = module
    self._graph, state, operands = nnx.split(module, nnx.Param, OperandVariable)
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
        param.contracted,
        param.init,
        param.fan_in,
        param.compute_dtype,
        param.update,
        param.quantizer,
        param.statistic,
        changes,
        param.quantizer is not None and (read_only or not changes),
        param.matmul,
        param.padding,
      )
    # Name of a weight -> the path and the variable of its quantized form.
    self._operands: dict[str, tuple[tuple[Any, ...], Any]] = {
      ".".join(map(str, (*path[:-1], variable.weight))): (path, variable)
      for path, variable in nnx.to_flat_state(operands)
    }

  @property
  def num_params(self) -> int:
    """The parameter count, without non-trainable state and other weights with an `update` rule."""
    return sum(spec.size for spec in self.weights.values() if spec.update is None)

  @property
  def num_trained(self) -> int:
    """The parameter count of the weights that the optimizer trains."""
    return sum(spec.size for spec in self.optimized(self.weights).values())

  @property
  def num_quantized(self) -> int:
    """The parameter count of the weights that are stored quantized."""
    return sum(spec.size for spec in self.weights.values() if spec.is_quantized)

  @property
  def statistics(self) -> list[str]:
    """The names of non-trainable state."""
    return [name for name, spec in self.weights.items() if spec.statistic]

  @property
  def frozen(self) -> list[str]:
    """The names of the frozen weights."""
    return [name for name, spec in self.weights.items() if not spec.changes]

  def optimized(self, values: Mapping[str, T]) -> dict[str, T]:
    """Returns the entries of `values` whose weights the optimizer trains."""
    return {name: v for name, v in values.items() if self.weights[name].trained}

  def prepare(self, params: Mapping[str, jax.Array]) -> Params:
    """Returns `params` cast to their compute dtypes, once per step instead of once per use."""
    return {
      name: w if isinstance(w, Quantized) else w.astype(self.weights[name].compute_dtype)
      for name, w in params.items()
    }

  def quantize_operands(self, prepared: Mapping[str, jax.Array]) -> dict[str, QuantizedOperand]:
    """Quantizes the weights of low-precision matmuls, once per step instead of once per use."""
    operands = {}
    for name, (_, variable) in self._operands.items():
      if isinstance(w := prepared.get(name), Quantized | None):
        continue
      stacked = w.shape[: w.ndim - variable.num_dims]
      matrices = w.reshape(*stacked, self.weights[name].fan_in, -1)
      operands[name] = variable.dot.quantized(jax.lax.stop_gradient(matrices))
    return {name: w8 for name, w8 in operands.items() if w8 is not None}

  def bind(
    self, params: Mapping[str, Any], operands: Mapping[str, QuantizedOperand] | None = None
  ) -> Any:
    """Returns the module with `params` as its weights; costs nothing in a compiled function.

    If `operands` lacks the weight of a low-precision matmul, every use quantizes it again.
    """
    given = operands or {}
    flat = [(self._paths[name], value) for name, value in params.items()]
    flat += [(path, given.get(name)) for name, (path, _) in self._operands.items()]
    return nnx.merge(self._graph, nnx.from_flat_state(flat))
