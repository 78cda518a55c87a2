# SPDX-License-Identifier: Apache-2.0
"""Metrics of single layers: norms of gradients, weights and updates, and what the layers report.

The devices compute sums of squares and counts, one array per weight or metric; the host makes a
table of them, in the order of the layers.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxlike.devices import mesh
from paxlike.layers.aux_losses import Aux
from paxlike.layers.module import Definition, WeightSpec
from paxlike.layers.stack import layout_of

# Metric -> group of weights, expert, or part of the block -> the value of each layer.
Table = dict[str, dict[str, list[float | None]]]
_PARTS = {
  "residual_rms": "block",
  "attention_rms": "attention",
  "mlp_rms": "mlp",
  "max_attention_logit": "attention",
  "router_entropy": "mlp",
}


class LayerMetrics(NamedTuple):
  """What a step returns of its layers; float32.

  Attributes:
    gradients: The sum of squares of the gradient of each trained weight, in the order of
      `Definition.weights`; one for each layer, if the weight stacks layers in it.
    weights: The same of the weights before the step.
    updates: The same of their change.
    sums, maxima: `layer_sums` and `layer_maxima` of `Aux`.
  """

  gradients: Any
  weights: Any
  updates: Any
  sums: dict[str, Any]
  maxima: dict[str, Any]


def of_step(
  definition: Definition,
  aux: Aux,
  gradients: Mapping[str, jax.Array],
  old: Mapping[str, jax.Array],
  new: Mapping[str, jax.Array],
) -> LayerMetrics:
  """Returns the metrics of a step, inside a traced function, for the weights around it."""

  def replicated(x: jax.Array) -> jax.Array:
    """Since the host that reads it may hold only some layers or experts."""
    return mesh.constrain(x, *(None,) * x.ndim)

  def squares(of: Callable[[str], jax.Array]) -> jax.Array:
    trained = definition.optimized(definition.weights)
    sums = (replicated(_squares(spec, of(name))) for name, spec in trained.items())
    return jnp.concatenate(list(sums))

  def change(name: str) -> jax.Array:
    return new[name].astype(jnp.float32) - old[name].astype(jnp.float32)

  return LayerMetrics(
    gradients=squares(gradients.__getitem__),
    weights=squares(old.__getitem__),
    updates=squares(change),
    sums=jax.tree.map(replicated, aux.layer_sums),
    maxima=jax.tree.map(replicated, aux.layer_maxima),
  )


def _squares(spec: WeightSpec, x: jax.Array) -> jax.Array:
  """Returns [L], or [1], sums of squares: one for each layer, if the weight stacks layers."""
  dims = tuple(dim for dim, name in enumerate(spec.dims) if name != "layer")
  return jnp.square(x.astype(jnp.float32)).sum(dims).reshape(-1)


def table(definition: Definition, metrics: LayerMetrics) -> Table:
  """Returns the table of a step, given host arrays; None: no such value, or it is not finite."""
  with np.errstate(all="ignore"):
    found = {
      "gradient_norm": _norms(definition, metrics.gradients),
      "weight_norm": _norms(definition, metrics.weights),
      "update_norm": _norms(definition, metrics.updates),
    }
    found["update_to_weight"] = {
      group: norm / found["weight_norm"][group] for group, norm in found["update_norm"].items()
    }
    for name, counts_LE in metrics.sums.items():
      if name.startswith("expert_load/"):
        share_LE = counts_LE / counts_LE.sum(-1, keepdims=True)
        _merge(found, "expert_load", dict(enumerate(share_LE.T * share_LE.shape[1])))
        entropy_L = -(share_LE * np.log(np.maximum(share_LE, 1e-30))).sum(-1)
        _merge(found, "expert_load_entropy", {"mlp": entropy_L})
    for name, pair_L2 in (metrics.sums | metrics.maxima).items():
      if name in _PARTS:
        value_L = pair_L2[:, 0] / pair_L2[:, 1]
        found[name] = {_PARTS[name]: np.sqrt(value_L) if name.endswith("_rms") else value_L}
  return {name: {str(g): _plain(x) for g, x in groups.items()} for name, groups in found.items()}


def _norms(definition: Definition, squares: np.ndarray) -> dict[Any, np.ndarray]:
  """Returns group -> [L], or [1] outside the stack, of the norms of a module's own weights.

  The name of a group is the path of the module in its block ("attention.query"), or in the model
  ("model.embedding"). Layers without the module are NaN.
  """
  layout = layout_of(definition.module)
  sums: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
  for name in definition.optimized(definition.weights):
    location = layout.locate(name)
    if location is None:
      path, layers, indexes, size = f"model.{name}", [0], [0], 1
    else:
      path = location.template.partition("{}.")[2]
      layers, indexes, size = list(location.layers), list(location.indexes), layout.num_layers
    stacked = location is not None and location.stacked
    group = path.rpartition(".")[0]
    total, is_there = sums.setdefault(group, (np.zeros(size), np.zeros(size, bool)))
    value, squares = np.split(squares, [layout.stacked_size if stacked else 1])
    total[layers] += value[indexes]
    is_there[layers] = True
  return {g: np.where(is_there, np.sqrt(total), np.nan) for g, (total, is_there) in sums.items()}


def _merge(found: dict[str, Any], name: str, groups: Mapping[Any, np.ndarray]):
  """Adds the values of layers that have some; other layers may have another number of experts."""
  for group, value in groups.items():
    old = found.setdefault(name, {}).get(group, value)
    found[name][group] = np.where(np.isnan(value), old, value)


def _plain(values: np.ndarray) -> list[float | None]:
  return [float(f"{x:.6g}") if np.isfinite(x) else None for x in values]
