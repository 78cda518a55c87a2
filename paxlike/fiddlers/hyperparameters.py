# SPDX-License-Identifier: Apache-2.0
"""Fiddlers of learning rates and initial weights."""

import math
from collections.abc import Callable
from typing import Any

import fiddle as fdl
import optax

from paxlike import layers
from paxlike.config import building, ranges
from paxlike.errors import UserError
from paxlike.fiddlers.selection import having, select
from paxlike.training import optimizers

# Roles of linear maps of which the outputs, or the inputs, do not grow with the width.
_TO_FIXED = ("head", "router", "value_head", "layer_gate", "layer_projection")
_FROM_FIXED = ("layer_output",)


def parametrize(
  graph: fdl.Buildable,
  base_dim: ranges.Size | None = None,
  base_layers: ranges.Depth | None = None,
  base_head_dim: ranges.Size | None = None,
):
  """Makes the hyperparameters those of a base model: muP and, with `base_layers`, CompleteP.

  `optimizers.Parametrization` has the sources, and scales learning rates; initial weights and the
  forward pass are scaled here.

  Args:
    graph: The graph.
    base_dim: D of the base model; None: that of this one.
    base_layers: Its number of layers, whose residual branches are added as they are; None: that of
      this one.
    base_head_dim: H of the base model; None: that of this one.

  All widths are assumed to grow with D: those of MLPs and experts, and the numbers of heads.

  Raises:
    UserError: The optimizer, or the width of the heads of latent attention, cannot be scaled.
  """
  (decoder,) = select(graph, layers.Decoder)
  stack = decoder.stack
  ends = len(getattr(stack, "prologue", ())) + len(getattr(stack, "epilogue", ()))
  num_layers = ends + len(stack.pattern) * stack.repeats
  width, depth = decoder.dim / (base_dim or decoder.dim), num_layers / (base_layers or num_layers)
  for node in (*select(graph, layers.Linear), *select(graph, layers.ExpertLinear)):
    if _called(node.init) is not layers.zeros and node.role not in _FROM_FIXED:
      node.init = _for_width(node.init, width, to_width=node.role not in _TO_FIXED)
  for node in select(graph, layers.Embedding):
    # Scales that families set follow from the width: its root, and for logits 1 over its root.
    if (given := getattr(node, "scale", 1.0)) != 1:
      node.scale = given / width**0.5
    if getattr(decoder, "head", None) is None:
      given = getattr(node, "logits_scale", 1.0)
      node.logits_scale = given / (width if given == 1 else width**0.5)
  for node in select(graph, layers.Block):
    node.residual_scale = getattr(node, "residual_scale", 1.0) / depth
  for node in select(graph, layers.Attention):
    head = node.head_dim / (base_head_dim or node.head_dim)
    if head != 1:
      derived = node.head_dim**-0.5
      given = getattr(node, "scale", None) or derived
      # One that follows from the width of the heads already has a root of it.
      node.scale = given / (head**0.5 if math.isclose(given, derived) else head)
  if base_head_dim is not None and any(select(graph, layers.LatentAttention)):
    raise UserError("BASE_DIMS_PER_HEAD: the heads of latent attention cannot be scaled.")
  rules = [*select(graph, optimizers.adamw), *select(graph, optimizers.descent)]
  if not rules and getattr(graph, "optimizer", None) is not None:
    raise UserError("PARAMETRIZATION cannot scale the learning rates of this OPTIMIZER.")
  for node in rules:
    rule = _growth(getattr(node, "rule", None))
    node.parametrization = fdl.Config(
      optimizers.Parametrization, width=width, depth=depth, rule=rule
    )


def change_rate(graph: fdl.Buildable, change: Callable[[optimizers.Schedule], Any]):
  """Replaces the learning-rate schedule of the optimizer by what `change` makes of it."""
  for node in list(having(graph.optimizer, "learning_rate")):
    node.learning_rate = change(_schedule(node.learning_rate))


def _schedule(rate: Any) -> optimizers.Schedule:
  """Returns the schedule that an argument stands for: a graph, a function or a number."""
  built: Any = building.build(rate) if isinstance(rate, fdl.Buildable) else rate
  return optax.constant_schedule(built) if isinstance(built, int | float) else built


def _for_width(init: Any, width: float, *, to_width: bool) -> Any:
  """Returns the initializer of a matrix whose inputs are wider than in the base model.

  Args:
    init: That of the base model.
    width: How much wider the inputs are.
    to_width: Whether the outputs are wider, too.
  """
  power = 0.5 if to_width else 1.0
  drawn = init
  while _called(drawn) is layers.scaled:
    drawn = drawn.init
  if _called(drawn) is layers.gaussian_fan_in:  # It shrinks by the root of the width.
    power -= 0.5
  return fdl.Partial(layers.scaled, init=init, by=width**-power) if power else init


def _called(value: Any) -> Any:
  """Returns the function of a node, or the value itself."""
  return fdl.get_callable(value) if isinstance(value, fdl.Buildable) else value


def _growth(rule: Any) -> str:
  """Returns how the steps of a rule grow with the width; see `optimizers.Parametrization`."""
  if _called(rule) is not optimizers.muon:
    return "elementwise"
  return "orthogonal" if getattr(rule, "scale", "rms") == "width" else "orthogonal_rms"
