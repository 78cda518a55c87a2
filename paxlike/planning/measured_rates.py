# SPDX-License-Identifier: Apache-2.0
"""The rates that kernels reach on a user's own machine, from a profile of a step there.

`paxlike --mode=profile --json` prints the measured and the predicted time of every kernel. A plan
scales the predicted rates of each kind of kernel by the ratio of their sums.
"""

import dataclasses
import math
from typing import Any

from paxlike import file_io
from paxlike.devices import chips
from paxlike.devices.kernel_rates import KernelRates
from paxlike.errors import UserError

# The kind of kernels -> the rates that they measure.
_RATES = {
  "matmul": ("matmul", "matmul_8_bits", "matmul_f32"),
  "attention": ("attention", "attention_backward"),
  "memory-bound": ("bandwidth",),
}
# Kernels that together take less of the step than this say little.
_LEAST_SHARE = 0.02


@dataclasses.dataclass(frozen=True)
class MeasuredRates:
  """What was measured.

  Attributes:
    path: The file.
    chip: The name of the chip; see `chips.name`.
    factors: The kind of kernels -> measured rate, as a multiple of the predicted one.
  """

  path: str
  chip: str
  factors: dict[str, float]

  def applied(self, rates: KernelRates, device_kind: str) -> KernelRates:
    """Returns rates, scaled.

    Raises:
      UserError: They are of another chip.
    """
    if chips.name(device_kind) != self.chip:
      raise UserError(f"--calibrate={self.path} is of {self.chip}, and the plan of {device_kind}.")
    changed = {
      name: factor * getattr(rates, name)
      for kind, factor in self.factors.items()
      for name in _RATES[kind]
    }
    return dataclasses.replace(rates, **changed)


def read(path: str) -> MeasuredRates:
  """Returns the rates in a file of `--mode=profile --json`.

  Raises:
    UserError: It cannot be read, is something else, or has no kernels that took enough time.
  """
  return file_io.parse_output(
    path, lambda facts: _of(facts, path), name=f"--calibrate={path}", of="--mode=profile --json"
  )


def _of(facts: dict[str, Any], path: str) -> MeasuredRates:
  chip = chips.name(facts["device_kind"])
  if chip is None:
    raise UserError(f"--calibrate={path} is of {facts['device_kind']}, which has no data sheet.")
  measured, predicted = dict.fromkeys(_RATES, 0.0), dict.fromkeys(_RATES, 0.0)
  for kernel in facts["kernels"]:
    kind, seconds = kernel["kind"], kernel["busy"]
    if kind in _RATES and seconds and kernel["roofline"]:
      measured[kind] += seconds
      predicted[kind] += kernel["roofline"]
  least = _LEAST_SHARE * facts["seconds"]
  factors = {
    kind: predicted[kind] / seconds for kind, seconds in measured.items() if seconds > least
  }
  if not factors or not all(math.isfinite(factor) and factor > 0 for factor in factors.values()):
    raise UserError(f"--calibrate={path} has no kernels whose rates it could measure.")
  return MeasuredRates(path, chip, factors)
