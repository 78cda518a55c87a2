# SPDX-License-Identifier: Apache-2.0
"""The losses that a session trains on."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.training.forward_backward import LossAndDerivative

# (log_probabilities_BT, arrays) -> (loss, name -> [sum, weight]), in JAX. `arrays` are float32
# [B, T]: `weights`, `advantages` and `old_log_probabilities`; `values` of a value head; and if all
# answers have them, their `returns`, and their `values` as `old_values`.
Loss = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


class LossResult(NamedTuple):
  """What `Session.forward_backward` returns.

  Attributes:
    loss: The loss.
    log_probabilities: Of the tokens of each answer, before the update.
    metrics: Means of the metrics that the loss returns.
  """

  loss: float
  log_probabilities: list[np.ndarray]
  metrics: dict[str, float]


class Losses:
  """Losses, each of which is compiled once."""

  def __init__(self, **options: Any):
    """`options` are for `jax.jit`."""
    self._options = options
    self._derivatives: dict[Any, LossAndDerivative] = {}

  def derivative(self, loss: str | Loss) -> "LossAndDerivative":
    """Returns a loss with its derivative.

    Raises:
      UserError: It is neither a function nor the name of a loss; or, when called, it returns
        something else than a loss.
    """
    from paxlike.training.forward_backward import differentiated
    from paxlike.training.objectives import Grpo

    named: dict[Any, Loss] = {"cross_entropy": _cross_entropy, "policy": Grpo().loss}
    if not callable(loss) and loss not in named:
      raise UserError(f"loss={loss!r}: expected cross_entropy, policy, or a function.")
    if loss not in self._derivatives:
      function: Any = named.get(loss, loss)
      self._derivatives[loss] = differentiated(_checked(function), **self._options)
    return self._derivatives[loss]


def _cross_entropy(log_probabilities_BT: Any, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
  return -(log_probabilities_BT * arrays["weights"]).sum(), {}


def _checked(loss: Loss) -> Loss:
  """Returns a loss that raises a UserError if its result is none."""

  def checked(log_probabilities_BT: Any, arrays: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    found: Any = loss(log_probabilities_BT, arrays)
    is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
    if not is_pair or jnp.shape(found[0]) or any(jnp.shape(x) != (2,) for x in found[1].values()):
      raise UserError(
        "a loss returns a number and a dict of metrics, [sum, weight] each: its result is"
        f" {jax.tree.map(jnp.shape, found)!r:.200} in shapes."
      )
    return found

  return checked
