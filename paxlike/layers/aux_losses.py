# SPDX-License-Identifier: Apache-2.0
"""Auxiliary losses and metrics that layers return besides their outputs."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Aux(NamedTuple):
  """Auxiliary losses and metrics, summed over layers; a pytree.

  Attributes:
    losses: Scalars added to the training loss, averaged over microbatches ("balance_loss").
    metrics: [sum, weight] pairs, summed over microbatches ("dropped_fraction").
  """

  losses: dict[str, jax.Array]
  metrics: dict[str, jax.Array]

  def averaged(self, count: int) -> "Aux":
    """Returns self, a sum over `count` microbatches, with the losses divided by `count`."""
    return self._replace(losses={name: value / count for name, value in self.losses.items()})

  def where(self, condition: jax.Array) -> "Aux":
    """Returns self if the scalar `condition` is true, else zeros."""
    return jax.tree.map(lambda x: jnp.where(condition, x, jnp.zeros_like(x)), self)


def none() -> Aux:
  """Returns an Aux without losses and metrics."""
  return Aux({}, {})


def add(a: Aux, b: Aux) -> Aux:
  """Returns a + b, where a missing entry counts as zero."""
  zero = jnp.zeros(())
  return Aux(
    *(
      {name: of_a.get(name, zero) + of_b.get(name, zero) for name in {**of_a, **of_b}}
      for of_a, of_b in zip(a, b, strict=True)
    )
  )
