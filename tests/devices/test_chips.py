# SPDX-License-Identifier: Apache-2.0
"""Devices are known by the names that JAX gives them."""

import pytest

from paxlike.devices import chips


@pytest.mark.parametrize(
  ("kind", "flops", "gigabytes"),
  [
    ("NVIDIA H100 80GB HBM3", 989.5e12, 85),
    ("NVIDIA H200", 989.5e12, 151),
    ("NVIDIA GH200 480GB", 989.5e12, 102),
    ("NVIDIA GB200", 2500e12, 198),
    ("NVIDIA GB300", 2500e12, 297),
    ("NVIDIA B200", 2250e12, 192),
    ("NVIDIA B300 SXM6 AC", 2250e12, 297),
    ("TPU v5 lite", 197e12, 17),
    ("TPU v5p", 459e12, 103),
    ("TPU7x", 2307e12 / 2, 102),  # JAX has two devices for a chip.
  ],
)
def test_devices_have_the_peaks_of_their_data_sheets(kind, flops, gigabytes):
  chip = chips.find(kind)
  assert chip is not None
  assert (chip.flops, round(chip.memory / 1e9)) == (flops, gigabytes)


def test_programs_have_the_share_of_a_gpu_that_users_name_and_all_that_is_told_of_a_tpu(
  monkeypatch,
):
  h200, v5e = chips.CHIPS["H200"], chips.CHIPS["TPU v5e"]
  for name in chips.SHARE_NAMES:
    monkeypatch.delenv(name, raising=False)
  # JAX by itself would take 0.75.
  assert 0.9 * h200.memory < h200.usable_memory < 0.95 * h200.memory
  for name in chips.SHARE_NAMES:
    with monkeypatch.context() as changed:
      changed.setenv(name, "0.5")
      assert h200.usable_memory == h200.memory // 2
      assert v5e.usable_memory == v5e.memory


def test_communicators_leave_programs_less_of_a_gpu():
  h100, v5e = chips.CHIPS["H100"], chips.CHIPS["TPU v5e"]
  assert h100.usable_memory_beside(0) == h100.usable_memory_beside(4) == h100.usable_memory
  assert h100.usable_memory - h100.usable_memory_beside(10) == pytest.approx(1.2e9, rel=0.05)
  assert h100.usable_memory_beside(10) - h100.usable_memory_beside(12) == pytest.approx(1.4e9)
  assert v5e.usable_memory_beside(12) == v5e.memory


def test_what_is_not_known_has_none():
  assert chips.find("cpu") is None
