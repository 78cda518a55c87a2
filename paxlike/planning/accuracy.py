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
  "a100": 0.052,
  "h100": 0.068,
  "blackwell": 0.157,
  "v5e": 0.079,
  "v5p": 0.149,
  "v6e": 0.043,
  "v7x": 0.125,
}
_TENSOR, _IN_8_BITS, _EXPERTS = 0.088, 0.105, 0.145
# Published pipelines. None of them is a loop over ticks; from compiled programs of such loops,
# predictions differ by 9.0 % (docs/results.md).
_PIPELINE = 0.093


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
