# SPDX-License-Identifier: Apache-2.0
"""How far predicted step times are off.

The errors are those of published steps, each predicted by constants that were fitted to the steps
of other sources: `benchmarks/calibration.py --held_out` prints them by group.
"""

from paxlike.devices.chips import Chip
from paxlike.planning.model_sizes import ModelSizes
from paxlike.planning.parallel_config import Configuration

# Mean errors as fractions.
_OF_FAMILY = {
  "a100": 0.050,
  "h100": 0.070,
  "blackwell": 0.175,
  "v5e": 0.082,
  "v5p": 0.126,
  "v6e": 0.106,
  "v7x": 0.169,
}
_TENSOR, _PIPELINE, _IN_8_BITS, _EXPERTS = 0.085, 0.093, 0.114, 0.166


def expected_error(model: ModelSizes, how: Configuration, chip: Chip) -> float:
  """Returns the expected error of a prediction, as a fraction: the largest of its groups'."""
  groups = (
    (_OF_FAMILY[chip.family], True),
    (_TENSOR, how.sizes["tensor"] > 1),
    (_PIPELINE, how.pipeline is not None),
    (_IN_8_BITS, any(weight.operands for weight in model.weights)),
    (_EXPERTS, model.moe_layers > 0),
  )
  return max(error for error, is_in in groups if is_in)
