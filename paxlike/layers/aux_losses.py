# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses and metrics that layers return besides their outputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Aux(NamedTuple):
  """Auxiliary losses and metrics, summed over layers; a pytree.

  `layer_sums` and `layer_maxima` hold metrics of single layers, only if `Context.log_layers`. A
  layer returns its own values, and a stack adds a leading dim L, with zeros for layers without that
  metric.

  Attributes:
    losses: Scalars added to the training loss, averaged over microbatches ("balance_loss").
    summed: Scalars added to the training loss like the objective's own: summed over microbatches,
      and divided by its weight ("mtp_loss"). They are not logged.
    metrics: [sum, weight] pairs, summed over microbatches ("dropped_fraction").
    layer_sums: Per layer [sum, weight], or counts [E], summed over microbatches ("residual_rms").
    layer_maxima: Per layer [value, 1], combined by maximum; values are at least 0.
    shared: `KeysValues` for later layers, by their window; a stack passes them on in `Context`, and
      returns none.
  """

  losses: dict[str, jax.Array]
  summed: dict[str, jax.Array]
  metrics: dict[str, jax.Array]
  layer_sums: dict[str, jax.Array]
  layer_maxima: dict[str, jax.Array]
  shared: dict[int, Any]

  def averaged(self, count: int) -> "Aux":
    """Returns self, a sum over `count` microbatches, with the losses divided by `count`."""
    return self._replace(losses={name: value / count for name, value in self.losses.items()})

  def where(self, condition: jax.Array) -> "Aux":
    """Returns self if the scalar `condition` is true, else zeros."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), self)

  def of_layer(self, index: int | jax.Array, num_layers: int) -> "Aux":
    """Returns self, of one layer, with the leading dim L of the metrics of single layers."""

    def placed(x: jax.Array) -> jax.Array:
      is_layer = (jnp.arange(num_layers) == index).reshape(-1, *(1,) * x.ndim)
      return jnp.where(is_layer, x, jnp.zeros_like(x))

    sums, maxima = jax.tree.map(placed, (self.layer_sums, self.layer_maxima))
    return self._replace(layer_sums=sums, layer_maxima=maxima)


def none() -> Aux:
  """Returns an Aux without losses and metrics."""
  return Aux({}, {}, {}, {}, {}, {})


def add(a: Aux, b: Aux) -> Aux:
  """Returns a + b, where a missing entry counts as zero; `shared` of b replaces that of a."""
  zero = jnp.zeros(())
  combine = (jnp.add, jnp.add, jnp.add, jnp.add, jnp.maximum)
  sums = (
    {name: of(of_a.get(name, zero), of_b.get(name, zero)) for name in {**of_a, **of_b}}
    for of, of_a, of_b in zip(combine, a[:-1], b[:-1], strict=True)
  )
  return Aux(*sums, shared={**a.shared, **b.shared})


def total(stacked: Aux) -> Aux:
  """Returns the sum of Aux that are stacked along a leading dim."""
  sums = jax.tree.map(lambda values: values.sum(0), stacked)
  maxima = {name: values.max(0) for name, values in stacked.layer_maxima.items()}
  return sums._replace(layer_maxima=maxima)


def total_over(axis: str, aux: Aux) -> Aux:
  """Returns the sum of Aux over the devices along a mesh axis, inside `shard_map`."""
  return jax.lax.psum(aux, axis)._replace(layer_maxima=jax.lax.pmax(aux.layer_maxima, axis))
