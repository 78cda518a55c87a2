# SPDX-License-Identifier: Apache-2.0
"""A LLaMA with gated attention, trained by Muon and evaluated with averaged weights.

    python -m examples.gated_llama runs/gated

Each part is a mixin that any experiment can take. The data are those of `extensions.py`.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
from optax import contrib

import paxlike
from examples.extensions import SumsData, Tiny
from paxlike import layers
from paxlike.experiments.llama import Llama
from paxlike.layers.module import Params, WeightSpec
from paxlike.training import optimizers


class GatedAttention(layers.Attention):
  """Gates the outputs of the heads by a sigmoid of the input (Qiu et al., 2025, arXiv:2505.06708).

  `project` is called by training, prefill and cached decoding alike.
  """

  def __init__(self, dim: int, *, gate, **parts):
    super().__init__(dim, **parts)
    self.gate = gate({"model": dim}, {"heads": self.num_heads, "head": self.head_dim})

  def project(self, y_BTNH, x_BTD, context):
    gate_BTNH = jax.nn.sigmoid(self.gate(x_BTD, context))
    return super().project(y_BTNH * gate_BTNH.astype(y_BTNH.dtype), x_BTD, context)


class Gated(paxlike.Experiment):
  """A mixin with gated attention."""

  def attention(self) -> fdl.Partial[layers.Attention]:
    attention = super().attention()
    fdl.update_callable(attention, GatedAttention)
    attention.gate = self.linear("attention_gate")
    return attention


def muon(*, learning_rate: optimizers.Schedule, weight_decay: float) -> optimizers.Optimizer:
  """Muon (Jordan et al., 2024) for the matrices of blocks, AdamW for all other weights."""

  def transform(weights: optimizers.Weights) -> optax.GradientTransformation:
    dims: Any = {name: _matrix(name, spec) for name, spec in weights.items()}
    return contrib.muon(
      learning_rate, weight_decay=weight_decay, muon_weight_dimension_numbers=dims
    )

  return optimizers.Optimizer(transform, learning_rate)


def _matrix(name: str, spec: WeightSpec) -> contrib.MuonDimensionNumbers | None:
  """Returns the axes of the matrices that a weight holds; None if it is not one of a block."""
  if not name.startswith("stack.") or not spec.contracted:
    return None
  inputs, outputs = [], []
  for axis, dim in enumerate(spec.dims):
    if dim not in ("layer", "experts"):  # Each layer or expert has a matrix of its own.
      (inputs if dim in spec.contracted else outputs).append(axis)
  return contrib.MuonDimensionNumbers(tuple(inputs), tuple(outputs))


class WithMuon(paxlike.Experiment):
  """A mixin that trains with Muon."""

  def optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    return fdl.Config(muon, learning_rate=self.schedule(), weight_decay=self.WEIGHT_DECAY)


class Average(NamedTuple):
  """The state of `averaged`: the moving average of each weight."""

  weights: Any


def averaged(*, optimizer: optimizers.Optimizer, decay: float) -> optimizers.Optimizer:
  """Trains by `optimizer`, and evaluates the exponential moving average of the weights."""

  def init(params: Any) -> Any:
    return Average(jax.tree.map(lambda w: w.astype(jnp.float32), params))

  def update(updates: Any, state: Any, params: Any = None) -> Any:
    new = {name: w + updates[name] for name, w in params.items()}
    return updates, Average(optax.incremental_update(new, state.weights, 1 - decay))

  average = optax.GradientTransformation(init, update)
  transform = optimizers.chain(optimizer.transform, average)
  return dataclasses.replace(optimizer, transform=transform, evaluated=_average)


def _average(opt_state: Any, params: Params) -> Params:
  """Returns the weights of in-run evaluation, --mode=eval, decoding, `paxlike.load` and export."""
  del params
  return opt_state[-1].weights


class Averaged(paxlike.Experiment):
  """A mixin that evaluates averaged weights, whatever the optimizer."""

  EMA_DECAY: float = 0.99  #: Decay of the average of the weights, per step.

  def optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    return fdl.Config(averaged, optimizer=super().optimizer(), decay=self.EMA_DECAY)


class AveragedSums(SumsData, Tiny, Averaged, Llama):
  """A plain LLaMA, trained by AdamW and evaluated by averaged weights."""

  LEARNING_RATE = 3e-3


class GatedSums(Gated, AveragedSums, WithMuon):
  """A LLaMA with gated attention, Muon and averaged weights."""


if __name__ == "__main__":
  run = paxlike.train(GatedSums, sys.argv[1])
  print(run.metrics())
