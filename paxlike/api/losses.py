# SPDX-License-Identifier: Apache-2.0
"""The losses that a session trains on."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from paxlike.errors import UserError

if TYPE_CHECKING:
  from paxlike.training.forward_backward import LossAndDerivative

# (log_probabilities_BT, arrays) -> (loss, name -> [sum, weight]), in JAX. `arrays` are float32
# [B, T]: `weights`, `advantages` and `old_log_probabilities`; `values` of a value head; and if all
# answers have them, their `returns`, and their `values` as `old_values`.
Loss = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


class Losses:
  """Losses, each of which is compiled once."""

  def __init__(self, **options: Any):
    """`options` are for `jax.jit`."""
    self._options = options
    self._derivatives: dict[Any, LossAndDerivative] = {}

  def derivative(self, loss: str | Loss) -> "LossAndDerivative":
    """Returns a loss with its derivative.

    Raises:
      UserError: It is neither a function nor the name of a loss.
    """
    from paxlike.training.forward_backward import differentiated
    from paxlike.training.objectives import Grpo

    named: dict[Any, Loss] = {"cross_entropy": _cross_entropy, "policy": Grpo().loss}
    if isinstance(loss, str) and loss not in named:
      raise UserError(f"loss={loss!r}: expected cross_entropy, policy, or a function.")
    if loss not in self._derivatives:
      function: Any = named.get(loss, loss)
      self._derivatives[loss] = differentiated(function, **self._options)
    return self._derivatives[loss]


def _cross_entropy(log_probabilities_BT: Any, arrays: Mapping[str, Any]) -> tuple[Any, Any]:
  return -(log_probabilities_BT * arrays["weights"]).sum(), {}
