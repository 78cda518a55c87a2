# SPDX-License-Identifier: Apache-2.0
"""Devices are known by the names that JAX gives them."""

import pytest

from paxlike import chips


@pytest.mark.parametrize(
  ("kind", "flops"),
  [
    ("NVIDIA H100 80GB HBM3", 989.5e12),
    ("TPU v5 lite", 197e12),
    ("TPU v5p", 459e12),
  ],
)
def test_devices_have_the_peaks_of_their_data_sheets(kind, flops):
  chip = chips.find(kind)
  assert chip is not None
  assert chip.flops == flops


def test_what_is_not_known_has_none():
  assert chips.find("cpu") is None
