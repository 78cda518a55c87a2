# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.py, as far as a machine without a GPU can run it."""

from typing import Any

import pytest

from benchmarks import gpu_suites
from paxlike import registry


@pytest.mark.parametrize("name", gpu_suites.MODELS)
def test_weights_and_moments_have_one_dtype_as_torch_s_have(name):
  model = gpu_suites.MODELS[name]
  experiment: Any = registry.find(model.experiment)()
  for knob, value in model.flags.items():
    experiment.set(knob, str(value), source="test")
  assert experiment.WEIGHT_DTYPE == experiment.ADAM_MOMENT_DTYPE


@pytest.mark.parametrize("suite", ["lora", "sft"])
def test_both_sides_are_measured_with_as_many_sequences(suite):
  cases = gpu_suites.SUITES[suite]
  sides = {
    side: {(case.model, case.batch) for case in cases if case.side == side}
    for side in ("gpu_ours", "torch_llama")
  }
  assert sides["gpu_ours"] == sides["torch_llama"]
  assert max(batch for _, batch in sides["gpu_ours"]) == 4
