# SPDX-License-Identifier: Apache-2.0
"""The coordinate check: how activations grow with the width after a few steps.

With the standard parametrization a wider model changes its activations by more per step, so that
its learning rate must be lower; with muP they keep their size (Yang et al., 2022, arXiv:2203.03466,
appendix D.1).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.module import Definition, Params
from paxlike.training.train_state import TrainState
from paxlike.transfer.program import Program
from paxlike.transfer.shapes import Training

_MOST_DRAWS = 8
_LAYER_METRICS = {"attention_rms": "attention", "mlp_rms": "mlp", "residual_rms": "residual"}


class Check(NamedTuple):
  """A coordinate check.

  Attributes:
    training: What all models have in common.
    rate: Their LEARNING_RATE.
    sizes: Parametrization -> its activations.
  """

  training: Training
  rate: float
  sizes: Mapping[str, "Sizes"]


class Sizes(NamedTuple):
  """The activations of one parametrization.

  Attributes:
    widths: W widths of the model.
    rms: Name of an activation -> [W, 1 + steps], its root mean square before and after each step.
    losses: [W, steps], the training loss.
  """

  widths: Sequence[int]
  rms: Mapping[str, np.ndarray]
  losses: np.ndarray

  def slopes(self, step: int = -1) -> dict[str, float]:
    """Returns the slope of log RMS over log width of each activation after a step."""
    return {name: slope(self.widths, rms[:, step]) for name, rms in self.rms.items()}


def slope(widths: Sequence[int], rms: np.ndarray) -> float:
  """Returns the slope of log(rms) over log(widths), by least squares; NaN if an RMS is 0 or NaN."""
  if not (np.isfinite(rms) & (rms > 0)).all():
    return float("nan")
  return float(np.polyfit(np.log(widths), np.log(rms), 1)[0])


def joined(
  widths: Sequence[int], found: Sequence[tuple[Mapping[str, np.ndarray], np.ndarray]]
) -> Sizes:
  """Returns what `measured` has found of each width."""
  rms = {name: np.array([one[name] for one, _ in found]) for name in found[0][0]}
  return Sizes(widths, rms, np.array([losses for _, losses in found]))


def draws(width: int, widest: int) -> int:
  """Returns how many initial weights to average over: narrow models vary more, and cost less."""
  return max(min(widest // width, _MOST_DRAWS), 1)


def measured(program: Program, draws: int = 1) -> tuple[dict[str, np.ndarray], np.ndarray]:
  """Trains, and returns (name -> [1 + steps] RMS of the activation, [steps] losses).

  Activations are those of one batch, the first, which is not trained on. Values are geometric means
  over `draws` initial weights, losses means.
  """
  definition, steps = program.trainer.definition, program.trainer.num_steps
  found: list[dict[str, jax.Array]] = []  # Of each draw and step.
  with program.batches(steps + 1) as (probed, *batches):
    probe = jax.jit(functools.partial(_activations, definition))

    def after_step(state: TrainState):
      found.append(probe(state.weights, probed))

    losses = [program.train(batches, draw=draw, after_step=after_step) for draw in range(draws)]
    values = jax.device_get(found)

  def mean(name: str) -> np.ndarray:
    rms = np.array([one[name] for one in values]).reshape(draws, -1)
    with np.errstate(divide="ignore"):
      return np.exp(np.log(rms).mean(0))  # 0 if one is.

  return {name: mean(name) for name in sorted(values[0], key=_place)}, np.mean(losses, 0)


def _place(name: str) -> tuple[int, int]:
  """Returns the place of an activation in the model: its layer, and where it is in the layer."""
  part, _, layer = name.partition(" ")
  if not layer:
    return (-1, 0) if part == "embedding" else (10**9, 0)
  return int(layer), list(_LAYER_METRICS.values()).index(part)


def _activations(definition: Definition, params: Params, batch: Batch) -> dict[str, jax.Array]:
  """Returns the RMS of the embedding, of each layer's outputs and residual, and of the logits."""
  model = definition.bind(definition.prepare(params))
  model.stack.log_layers = True
  context = context_of(batch)
  x_BTD, _, aux = model.hidden(batch["inputs"], context)
  found = {"embedding": _rms(model.embed(batch["inputs"], context))}
  for metric, name in _LAYER_METRICS.items():
    sums_L, counts_L = aux.layer_sums[metric].T
    found |= {f"{name} {layer}": rms for layer, rms in enumerate(jnp.sqrt(sums_L / counts_L))}
  return found | {"logits": _rms(model.logits(x_BTD))}


def _rms(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean())
