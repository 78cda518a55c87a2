# SPDX-License-Identifier: Apache-2.0
"""Compares each optimizer with an independent implementation, in float32.

    python benchmarks/optimizer_parity.py

prints a table: the largest difference of a weight from that of the reference after ten updates with
random gradients, in units of the root mean square of what the updates changed. References are
PyTorch's, optax's, or the formulas of the papers in NumPy, in float64.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

RATE, DECAY, UPDATES = 0.02, 0.1, 10
TOLERANCE = 2e-4  # The largest difference that rounding explains.
SHAPES = ((128, 192), (192, 128), (160, 160))

# (weights, gradients of each update) -> the weights after all updates.
Run = Callable[[list[Any], list[list[Any]]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Comparison:
  """An optimizer with its reference.

  Attributes:
    optimizer: Its name.
    reference: The reference, in words.
    ours: The rule of paxlike.
    theirs: Runs the reference.
  """

  optimizer: str
  reference: str
  ours: Callable[[], Any]
  theirs: Run

  def difference(self) -> float:
    """Returns the largest difference relative to the root mean square of the changes."""
    random = np.random.default_rng(0)
    weights = [random.normal(size=shape).astype(np.float32) for shape in SHAPES]
    gradients = [
      [random.normal(size=shape).astype(np.float32) for shape in SHAPES] for _ in range(UPDATES)
    ]
    ours, theirs = _ours(self.ours(), weights, gradients), self.theirs(weights, gradients)
    return max(
      np.abs(a - b).max() / np.sqrt(np.square(b - w).mean())
      for a, b, w in zip(ours, theirs, weights, strict=True)
    )


def _ours(optimizer: Any, weights: list[Any], gradients: list[list[Any]]) -> list[Any]:
  import jax
  import jax.numpy as jnp

  from paxlike import layers

  specs = {}
  for number, (rows, columns) in enumerate(SHAPES):
    linear = layers.Linear({"model": rows}, {"ffn": columns}, role="up")
    specs[f"{number}"] = layers.Definition(linear).weights["w"]
  transform = optimizer.transform(specs)
  params: Any = {f"{number}": jnp.asarray(w) for number, w in enumerate(weights)}
  state = transform.init(params)
  update = jax.jit(transform.update)
  for of_update in gradients:
    updates, state = update(
      {f"{i}": jnp.asarray(g) for i, g in enumerate(of_update)}, state, params
    )
    params = jax.tree.map(jnp.add, params, updates)
  if optimizer.evaluated is not None:
    params = optimizer.evaluated(state, params)
  return [np.asarray(params[f"{number}"], np.float64) for number in range(len(weights))]


def _descent(rule: Any, decay: float = DECAY) -> Any:
  from paxlike.training import optimizers

  rate = optimizers.constant(peak=RATE)
  return optimizers.descent(rule, learning_rate=rate, weight_decay=decay, clip_norm=None)


def _muon(**options: Any) -> Any:
  from paxlike.training import optimizers

  return _descent(optimizers.muon(optimizers.adam(b1=0.9, b2=0.95, eps=1e-8), **options))


def _schedule_free() -> Any:
  from paxlike.training import optimizers

  rule = optimizers.adam(b1=0.0, b2=0.95, eps=1e-8)
  return optimizers.schedule_free(_descent(rule), b1=0.9)


def _rule(name: str, **options: Any) -> Callable[[], Any]:
  def made() -> Any:
    from paxlike.training import optimizers

    return _descent(getattr(optimizers, name)(**options))

  return made


def _torch(name: str, **options: Any) -> Run:
  """Runs an optimizer of `torch.optim`, whose matrices are transposed."""

  def run(weights: list[Any], gradients: list[list[Any]]) -> list[Any]:
    import torch

    params = [torch.nn.Parameter(torch.tensor(w.T.copy())) for w in weights]
    optimizer = getattr(torch.optim, name)(params, lr=RATE, weight_decay=DECAY, **options)
    # Muon's iterations are in bfloat16.
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
      for of_update in gradients:
        for param, gradient in zip(params, of_update, strict=True):
          param.grad = torch.tensor(gradient.T.copy())
        optimizer.step()
    return [param.detach().numpy().T.astype(np.float64) for param in params]

  return run


def _optax_muon(weights: list[Any], gradients: list[list[Any]]) -> list[Any]:
  import jax.numpy as jnp
  import optax
  from optax import contrib

  transform = contrib.muon(
    RATE, weight_decay=DECAY, nesterov=False, consistent_rms=0.2, eps=1e-7, beta=0.95
  )
  params: Any = [jnp.asarray(w) for w in weights]
  state = transform.init(params)
  for of_update in gradients:
    updates, state = transform.update([jnp.asarray(g) for g in of_update], state, params)
    params = optax.apply_updates(params, updates)
  return [np.asarray(w, np.float64) for w in params]


def _each(step: Callable[[Any, Any, dict[str, Any], int], Any]) -> Run:
  """Runs the formulas of a paper; `step` returns a new weight, and keeps its state in a dict."""

  def run(weights: list[Any], gradients: list[list[Any]]) -> list[Any]:
    results = [w.astype(np.float64) for w in weights]
    states: list[dict[str, Any]] = [{} for _ in weights]
    for number, of_update in enumerate(gradients, start=1):
      for place, gradient in enumerate(of_update):
        results[place] = step(results[place], gradient.astype(np.float64), states[place], number)
    return [state.get("evaluated", w) for state, w in zip(states, results, strict=True)]

  return run


def _lion(w: Any, g: Any, state: dict[str, Any], number: int) -> Any:
  del number
  m = state.get("m", 0.0)
  state["m"] = 0.98 * m + 0.02 * g
  return w - RATE * (np.sign(0.9 * m + 0.1 * g) + DECAY * w)


ADEMAMIX = {"b1": 0.9, "b2": 0.95, "b3": 0.999, "alpha": 5.0, "eps": 1e-8, "warmup": 20}


def _ademamix(w: Any, g: Any, state: dict[str, Any], number: int) -> Any:
  b1, b2, b3, alpha, eps, warmup = ADEMAMIX.values()
  # Algorithm 1 and equation 4 of the paper, with t from 0 as optax counts.
  share = min((number - 1) / warmup, 1)
  logs = math.log(b1), math.log(b3)
  slow = math.exp(logs[0] * logs[1] / ((1 - share) * logs[1] + share * logs[0]))
  state["m1"] = b1 * state.get("m1", 0.0) + (1 - b1) * g
  state["m2"] = slow * state.get("m2", 0.0) + (1 - slow) * g
  state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g**2
  root = np.sqrt(state["v"] / (1 - b2**number)) + eps
  mixed = state["m1"] / (1 - b1**number) + alpha * share * state["m2"]
  return w - RATE * (mixed / root + DECAY * w)


def _adafactor(w: Any, g: Any, state: dict[str, Any], number: int) -> Any:
  """With a first moment, as of ADAFACTOR_MOMENTUM; algorithm 4 of the paper without its scale."""
  keep = 1 - number**-0.8
  squared = g**2 + 1e-30
  rows = state["rows"] = keep * state.get("rows", 0.0) + (1 - keep) * squared.mean(1)
  columns = state["columns"] = keep * state.get("columns", 0.0) + (1 - keep) * squared.mean(0)
  direction = g / np.sqrt(np.outer(rows, columns) / rows.mean())
  direction /= max(1, np.sqrt(np.square(direction).mean()))
  state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * direction
  return w - RATE * (state["m"] + DECAY * w)


def _schedule_free_adamw(w: Any, g: Any, state: dict[str, Any], number: int) -> Any:
  """`w` is y, the weights that gradients are taken at; x is evaluated."""
  z, x = state.get("z", w), state.get("evaluated", w)
  state["v"] = 0.95 * state.get("v", 0.0) + 0.05 * g**2
  root = np.sqrt(state["v"] / (1 - 0.95**number)) + 1e-8
  state["z"] = z - RATE * (g / root + DECAY * w)
  share = 1 / number  # All rates are the same.
  state["evaluated"] = (1 - share) * x + share * state["z"]
  return 0.1 * state["z"] + 0.9 * state["evaluated"]


ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
COMPARISONS = (
  Comparison(
    "adamw",
    "torch.optim.AdamW",
    _rule("adam", **ADAM),
    _torch("AdamW", betas=(0.9, 0.95), eps=1e-8),
  ),
  Comparison("muon", "torch.optim.Muon", _muon, _torch("Muon", adjust_lr_fn="match_rms_adamw")),
  Comparison(
    "muon, MUON_SCALE=width",
    "torch.optim.Muon",
    lambda: _muon(scale="width"),
    _torch("Muon", adjust_lr_fn="original"),
  ),
  Comparison(
    "muon, nesterov=False", "optax.contrib.muon", lambda: _muon(nesterov=False), _optax_muon
  ),
  Comparison("lion", "NumPy", _rule("lion", b1=0.9, b2=0.98), _each(_lion)),
  Comparison("ademamix", "NumPy", _rule("ademamix", **ADEMAMIX), _each(_ademamix)),
  Comparison(
    "adafactor, momentum=0.9", "NumPy", _rule("adafactor", momentum=0.9), _each(_adafactor)
  ),
  Comparison(
    "adafactor, by_parameter_scale=True",
    "torch.optim.Adafactor",
    _rule("adafactor", by_parameter_scale=True),
    _torch("Adafactor", foreach=False),
  ),
  Comparison("schedule_free_adamw", "NumPy", _schedule_free, _each(_schedule_free_adamw)),
)


def main():
  print("| optimizer | reference | largest difference |\n|---|---|---:|")
  for one in COMPARISONS:
    print(f"| `{one.optimizer}` | {one.reference} | {one.difference():.1e} |", flush=True)


if __name__ == "__main__":
  main()
