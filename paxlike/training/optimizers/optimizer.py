# SPDX-License-Identifier: Apache-2.0
"""The optimizer: an optax transformation with a schedule, and how transformations compose."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Set
from typing import Annotated, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from paxlike.config import patterns, ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params, WeightSpec
from paxlike.training.optimizers.guard import Guard
from paxlike.training.optimizers.parametrization import Parametrization
from paxlike.training.optimizers.schedules import Schedule

# Name -> spec of the trained weights. In a scanned stack, a spec has the leading dim "layer".
Weights = Mapping[str, WeightSpec]
# An optax transformation or, if it depends on the dims of weights, a function of their specs that
# returns one.
Transform = optax.GradientTransformation | Callable[[Weights], optax.GradientTransformation]

_LAYERS = re.compile(r"stack\.(layers|prologue|pattern|epilogue)\.\d+\.")  # In a weight's name.

# Value of LR_SCHEDULE or OPTIMIZER -> function that takes an experiment and returns the graph.
# None: built in; the experiment's `schedule()` or `optimizer()` makes the graph itself.
_Maker = TypeVar("_Maker", bound=Callable[[Any], Any])
SCHEDULES: dict[str, Callable[[Any], Any] | None] = {
  "linear_rampup_cosine_decay": None,
  "linear_rampup_exponential_decay": None,
  "constant": None,
  "linear": None,
  "inverse_sqrt": None,
  "cosine_restarts": None,
  "wsd": None,
}
OPTIMIZERS: dict[str, Callable[[Any], Any] | None] = dict.fromkeys(
  ("adamw", "muon", "lion", "adafactor", "ademamix", "schedule_free_adamw")
)
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
    observe: (state, trained weights after an update, number of updates before it) -> the state with
      what depends on those weights, which QK-clip may have scaled after the update; None: nothing.
    guard: Judges each step before its update; None: none does.
  """

  transform: Transform
  learning_rate: Schedule
  over_data: bool = False
  on_host: bool = False
  evaluated: Callable[[Any, Params], Params] | None = None
  observe: Callable[[Any, Params, jax.Array], Any] | None = None
  guard: Guard | None = None

  @property
  def rolls_back(self) -> bool:
    """Whether a run returns to its newest checkpoint after a spike."""
    return self.guard is not None and self.guard.action == "rollback"

  def transformation(self, definition: Definition) -> optax.GradientTransformation:
    """Returns the transformation for the trained weights of a model.

    It is given them in float32, whatever they are stored in, so that its state is float32, too.
    """
    return _in_float32(resolved(self.transform, definition.optimized(definition.weights)))


def _in_float32(transform: optax.GradientTransformation) -> optax.GradientTransformation:
  def cast(params: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(jnp.float32), params)

  def init(params: Any) -> Any:
    return transform.init(cast(params))

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    return transform.update(updates, state, None if params is None else cast(params))

  return optax.GradientTransformation(init, update)


@configurable
def guarded(optimizer: Optimizer, *, guard: Guard) -> Optimizer:
  """Returns an optimizer whose steps a guard judges before the update."""
  return dataclasses.replace(optimizer, guard=guard)


def resolved(transform: Transform, weights: Weights) -> optax.GradientTransformation:
  """Returns a transformation, made for these weights if it depends on their dims."""
  is_made = isinstance(transform, optax.GradientTransformation)
  return transform if is_made else transform(weights)


def chain(*transforms: Transform) -> Transform:
  """Returns `optax.chain` of transformations, any of which may depend on the dims of weights."""
  return lambda weights: optax.chain(*(resolved(transform, weights) for transform in transforms))


class Divided(NamedTuple):
  """The state of `divided`: that of the chosen weights, and that of the others."""

  chosen: Any
  others: Any


def divided(
  choose: Callable[[Weights], Set[str]], chosen: Transform, others: Transform
) -> Transform:
  """Returns a transformation by `chosen` for the weights that `choose` names, else by `others`."""

  def made(weights: Weights) -> optax.GradientTransformation:
    names = choose(weights)

    def split(tree: Any) -> tuple[Any, Any]:
      return (
        {name: x for name, x in tree.items() if name in names},
        {name: x for name, x in tree.items() if name not in names},
      )

    parts = [resolved(t, w) for t, w in zip((chosen, others), split(weights), strict=True)]

    def init(params: Any) -> Any:
      return Divided(*(t.init(w) for t, w in zip(parts, split(params), strict=True)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      of_params = (None, None) if params is None else split(params)
      given = zip(parts, split(updates), state, of_params, strict=True)
      found: Any = [t.update(g, s, w) for t, g, s, w in given]
      (one, first), (other, second) = found
      return {name: (one | other)[name] for name in updates}, Divided(first, second)

    return optax.GradientTransformation(init, update)

  return made


def by_layer(transform: optax.GradientTransformation) -> Transform:
  """Returns a transformation of each weight by itself, and of each layer of a stacked weight.

  It is for transformations that compute a statistic of a whole array.
  """

  def made(weights: Weights) -> optax.GradientTransformation:
    def of(function: Any, name: str) -> Any:
      return jax.vmap(function) if weights[name].dims[:1] == ("layer",) else function

    def init(params: Any) -> Any:
      return {name: of(transform.init, name)(w) for name, w in params.items()}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
      assert params is not None
      found = {
        name: of(transform.update, name)(x, state[name], params[name])
        for name, x in updates.items()
      }
      return {n: pair[0] for n, pair in found.items()}, {n: pair[1] for n, pair in found.items()}

    return optax.GradientTransformation(init, update)

  return made


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
def descent(
  rule: Transform,
  *,
  learning_rate: Schedule,
  weight_decay: ranges.Weight,
  weight_decay_schedule: Schedule | None = None,
  decayed: Callable[[Weights], dict[str, bool]] = everything,
  clip_norm: ranges.PositiveFloat | None,
  clip_update: ranges.PositiveFloat | None = None,
  decay_scales: Mapping[str, ranges.NonNegativeFloat] | None = None,
  scales: Mapping[str, ranges.NonNegativeFloat] | None = None,
  parametrization: Parametrization | None = None,
  over_data: bool = False,
  on_host: bool = False,
) -> Optimizer:
  """Descends along the direction that a rule makes of clipped gradients.

  Args:
    rule: Gradients -> the direction of a step, such as `adam`.
    learning_rate: Multiplies both the direction and the weight decay.
    weight_decay: Decoupled weight decay.
    weight_decay_schedule: Takes the place of `weight_decay`: step -> weight decay.
    decayed: Returns the mask of decayed weights, given their specs.
    clip_norm: Largest global norm of the gradients; None: no clipping.
    clip_update: Largest root mean square of the direction of a weight, of each layer by itself
      (Shazeer and Stern, 2018, arXiv:1804.04235); None: no clipping.
    decay_scales: Pattern of weights, as in `scales` -> a factor of their weight decay.
    scales: Pattern (`re.search`) of weights such as "stack.attention.query.w" -> a factor of their
      learning rate; factors of several patterns multiply.
    parametrization: Changes learning rates and epsilons for a model wider than a base model.
    over_data: See `Optimizer`.
    on_host: See `Optimizer`.
  """
  # The rule stays at index 1 of the chain, and the rate at 3: names in checkpoints have these.
  clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
  decay: Any = weight_decay if weight_decay_schedule is None else weight_decay_schedule

  def decays(weights: Weights) -> optax.GradientTransformation:
    return _decayed(decay, decayed(weights), _factors(decay_scales, weights, "WEIGHT_DECAY"))

  changes: list[Transform] = [decays]
  if parametrization is not None:
    changes.insert(0, functools.partial(_each_by, parametrization.rate))
    # Adam with epsilon e * f on g equals Adam with e on g / f: gradients are divided by f.
    clip = chain(clip, functools.partial(_each_by, lambda spec: 1 / parametrization.epsilon(spec)))
  if clip_update is not None:
    changes.insert(0, by_layer(optax.clip_by_block_rms(clip_update)))
  if scales:
    changes.append(lambda weights: _by(_factors(scales, weights, "LEARNING_RATE")))
  transform = chain(clip, rule, chain(*changes), optax.scale_by_learning_rate(learning_rate))
  return Optimizer(transform, learning_rate, over_data, on_host)


def _each_by(
  factor: Callable[[WeightSpec], float], weights: Weights
) -> optax.GradientTransformation:
  return _by({name: factor(spec) for name, spec in weights.items()})


def _decayed(
  decay: Any, mask: Mapping[str, bool], factors: Mapping[str, float]
) -> optax.GradientTransformation:
  """Returns `optax.add_decayed_weights`, with a factor for each weight."""
  transform = optax.add_decayed_weights(decay, mask=mask)
  if set(factors.values()) <= {1.0}:
    return transform

  def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    assert params is not None
    scaled = {name: factors[name] * w for name, w in params.items()}
    return transform.update(updates, state, scaled)

  return optax.GradientTransformation(transform.init, update)


def _factors(scales: Mapping[str, float] | None, weights: Weights, knob: str) -> dict[str, float]:
  """Returns the factor of each weight, by the patterns in the knob `knob`_SCALES."""
  names = {name: _LAYERS.sub("stack.", name) for name in weights}
  scales = scales or {}
  for pattern in scales:
    patterns.check(pattern, f"{knob}_SCALES")
    if not any(re.search(pattern, shown) for shown in names.values()):
      raise UserError(
        f"{knob}_SCALES: {pattern!r} is in no name of a trained weight, such as"
        f" {', '.join(sorted(set(names.values()))[:3])}."
      )
  return {
    name: math.prod(factor for pattern, factor in scales.items() if re.search(pattern, shown))
    for name, shown in names.items()
  }


def _by(factors: Mapping[str, float]) -> optax.GradientTransformation:
  """Multiplies the update of each weight."""

  def scaled(updates: Any, params: Any) -> Any:
    del params
    return {name: factors[name] * x for name, x in updates.items()}

  return optax.stateless(scaled)
