# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules, composed from optax."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import optax

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params, WeightSpec
from paxlike.layers.precision.rounding import in_dtype

# Completed updates -> learning rate.
Schedule = optax.Schedule
# Name -> spec of the trained weights. In a scanned stack, a spec has the leading dim "layer".
Weights = Mapping[str, WeightSpec]
# An optax transformation or, if it depends on the dims of weights, a function of their specs that
# returns one.
Transform = optax.GradientTransformation | Callable[[Weights], optax.GradientTransformation]

# Value of LR_SCHEDULE or OPTIMIZER -> function that takes an experiment and returns the graph.
# None: built in; the experiment's `schedule()` or `optimizer()` makes the graph itself.
_Maker = TypeVar("_Maker", bound=Callable[[Any], Any])
SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
  "linear_rampup_cosine_decay": None,
  "linear_rampup_exponential_decay": None,
  "constant": None,
}
OPTIMIZERS: dict[str, Callable[[Any], Any] | None] = {"adamw": None}
ScheduleName = Annotated[str, ranges.OneOf(SCHEDULES.keys())]
OptimizerName = Annotated[str, ranges.OneOf(OPTIMIZERS.keys())]


def register_schedule(name: str) -> Callable[[_Maker], _Maker]:
  """Decorator that makes `name` a value of LR_SCHEDULE.

  The function returns the graph of the schedule for an experiment, whose knobs it may read:

      @optimizers.register_schedule("inverse_root")
      def inverse_root_of(experiment):
        return fdl.Config(inverse_root, peak=experiment.LEARNING_RATE)

  Raises:
    UserError: The name is paxlike's, or registered by another module.
  """
  return functools.partial(_registered, SCHEDULES, name)


def register_optimizer(name: str) -> Callable[[_Maker], _Maker]:
  """Decorator that makes `name` a value of OPTIMIZER; see `register_schedule`.

  The function returns the graph of an `Optimizer`, with `experiment.schedule()` as its schedule.
  """
  return functools.partial(_registered, OPTIMIZERS, name)


def _registered(known: dict[str, Any], name: str, function: Any) -> Any:
  if name in known and getattr(known[name], "__module__", "paxlike") != function.__module__:
    raise UserError(f"{name!r} is already registered: {function.__qualname__} needs another name.")
  known[name] = function
  return function


@configurable
@dataclasses.dataclass(frozen=True)
class Optimizer:
  """An optax transformation, with its schedule for logging.

  Attributes:
    transform: Gradients -> updates, or a function that makes it for the specs of the weights.
    learning_rate: The schedule.
    over_data: Whether its state is sharded over the mesh axis `data` too, where weights are
      replicated (ZeRO-1; Rajbhandari et al., 2020, arXiv:1910.02054).
    on_host: Whether its state is offloaded to host memory between updates.
    evaluated: (state, trained weights) -> the weights that evaluation, decoding and export use in
      place of the trained ones, such as an average in the state; None: the trained ones.
  """

  transform: Transform
  learning_rate: Schedule
  over_data: bool = False
  on_host: bool = False
  evaluated: Callable[[Any, Params], Params] | None = None

  def transformation(self, definition: Definition) -> optax.GradientTransformation:
    """Returns the transformation for the trained weights of a model."""
    return resolved(self.transform, definition.optimized(definition.weights))


def resolved(transform: Transform, weights: Weights) -> optax.GradientTransformation:
  """Returns a transformation, made for these weights if it depends on their dims."""
  is_made = isinstance(transform, optax.GradientTransformation)
  return transform if is_made else transform(weights)


def chain(*transforms: Transform) -> Transform:
  """Returns `optax.chain` of transformations, any of which may depend on the dims of weights."""
  return lambda weights: optax.chain(*(resolved(transform, weights) for transform in transforms))


@configurable
def matrices(weights: Weights) -> dict[str, bool]:
  """Marks weight matrices and tables, not biases, norms and adapters (LoRA)."""
  return {
    name: bool(spec.contracted or "position" in spec.dims) and "adapter" not in spec.dims
    for name, spec in weights.items()
  }


@configurable
def everything(weights: Weights) -> dict[str, bool]:
  """Marks every weight."""
  return dict.fromkeys(weights, True)


@configurable
def adamw(
  *,
  learning_rate: Schedule,
  b1: ranges.Probability,
  b2: ranges.Probability,
  eps: ranges.Epsilon,
  weight_decay: ranges.Weight,
  decayed: Callable[[Weights], dict[str, bool]] = everything,
  clip_norm: ranges.PositiveFloat | None,
  moment_dtype: Literal["float32", "bfloat16"] = "float32",
  over_data: bool = False,
  on_host: bool = False,
) -> Optimizer:
  """AdamW (Loshchilov and Hutter, 2019) after clipping by global norm.

  Args:
    learning_rate: Multiplies both the Adam step and the weight decay.
    b1: Decay rate of the first moment.
    b2: Decay rate of the second moment.
    eps: Added outside the square root.
    weight_decay: Decoupled weight decay.
    decayed: Returns the mask of decayed weights, given their specs.
    clip_norm: Largest global norm of the gradients; None: no clipping.
    moment_dtype: Storage dtype of both moments; bfloat16 uses stochastic rounding.
    over_data: See `Optimizer`.
    on_host: See `Optimizer`.
  """
  clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
  transform = chain(
    clip,
    _stored_in(jnp.dtype(moment_dtype), optax.scale_by_adam(b1=b1, b2=b2, eps=eps)),
    lambda weights: optax.add_decayed_weights(weight_decay, mask=decayed(weights)),
    optax.scale_by_learning_rate(learning_rate),
  )
  return Optimizer(transform, learning_rate, over_data, on_host)


def _stored_in(dtype: Any, adam: optax.GradientTransformation) -> optax.GradientTransformation:
  """Stores the moments of Adam in `dtype`; the arithmetic is float32."""

  def moments(state: Any, cast: Callable[[jax.Array], jax.Array]) -> Any:
    return state._replace(mu=jax.tree.map(cast, state.mu), nu=jax.tree.map(cast, state.nu))

  def init(params: Any) -> Any:
    return moments(adam.init(params), lambda x: x.astype(dtype))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    updates, state = adam.update(updates, moments(state, lambda x: x.astype(jnp.float32)), params)
    return updates, moments(state, functools.partial(in_dtype, dtype=dtype, draw=state.count))

  return optax.GradientTransformation(init, update)


@configurable(name="constant_schedule")
def constant(*, peak: ranges.Rate) -> Schedule:
  """The same rate at every step."""
  return optax.constant_schedule(peak)


@configurable
def linear_rampup_cosine_decay(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_start: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  min_ratio: ranges.Fraction,
) -> Schedule:
  """Linear warmup from 0 to `peak`, then cosine decay from `decay_start` to `decay_end`.

  The rate is 0 at step 0 and stays at `min_ratio * peak` after the decay. The decay never begins
  before the end of the warmup and takes at least one step.
  """
  decay = optax.cosine_decay_schedule(peak, max(decay_end - decay_start, 1), alpha=min_ratio)
  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


@configurable
def linear_rampup_exponential_decay(
  *,
  peak: ranges.Rate,
  warmup: ranges.NonNegative,
  decay_start: ranges.NonNegative,
  decay_end: ranges.NonNegative,
  min_ratio: ranges.Epsilon,
) -> Schedule:
  """Linear warmup from 0 to `peak`, then exponential decay to `min_ratio * peak`.

  For the steps see `linear_rampup_cosine_decay`.
  """
  num_steps = max(decay_end - decay_start, 1)

  def decay(count: jax.typing.ArrayLike) -> jax.Array:
    return peak * jnp.exp(math.log(min_ratio) * jnp.minimum(count / num_steps, 1.0))

  return _after_rampup(decay, peak=peak, warmup=warmup, decay_start=decay_start)


def _after_rampup(decay: Schedule, *, peak: float, warmup: int, decay_start: int) -> Schedule:
  return optax.join_schedules(
    [optax.linear_schedule(0, peak, warmup), optax.constant_schedule(peak), decay],
    [warmup, max(decay_start, warmup)],
  )
