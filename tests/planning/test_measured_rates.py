# SPDX-License-Identifier: Apache-2.0
"""Plans at the rates that a user's own machine reaches."""

import json

import pytest
from helpers.program import run

from paxlike.devices import chips, kernel_rates
from paxlike.planning import measured_rates

CHIP = chips.CHIPS["H100"]
RATES = kernel_rates.of_chip(CHIP)


def profile(path, device_kind="NVIDIA H100 80GB HBM3", **slowdown):
  """Writes what --mode=profile --json prints of a step whose kernels are so much slower."""
  shares = {"matmul": 0.6, "attention": 0.2, "memory-bound": 0.15, "collectives": 0.05}
  kernels = [
    {"kind": kind, "busy": share * slowdown.get(kind.partition("-")[0], 1), "roofline": share}
    for kind, share in shares.items()
  ]
  path.write_text(json.dumps({"device_kind": device_kind, "seconds": 1.0, "kernels": kernels}))
  return path


def test_each_kind_of_kernel_is_as_slow_as_it_was_measured(tmp_path):
  file = profile(tmp_path / "mine.json", matmul=1.25, attention=0.5, memory=2.0)
  found = measured_rates.read(str(file)).applied(RATES, "NVIDIA H100")
  flops = RATES.matmul_flops(CHIP, 4096, 4096, 4096)
  assert found.matmul_flops(CHIP, 4096, 4096, 4096) == pytest.approx(flops / 1.25)
  for backward in (False, True):
    attention = RATES.attention_flops(CHIP, 4096, 128, backward=backward)
    mine = found.attention_flops(CHIP, 4096, 128, backward=backward)
    assert mine == pytest.approx(attention / 0.5)
  assert found.memory_bandwidth(CHIP) == pytest.approx(RATES.memory_bandwidth(CHIP) / 2)


def test_kernels_that_take_no_time_change_no_rate(tmp_path):
  file = profile(tmp_path / "mine.json", matmul=1.25, attention=0.01)
  assert set(measured_rates.read(str(file)).factors) == {"matmul", "memory-bound"}


PLAN = ("--fdl_config=Synthetic126M", "--mode=plan", "--topology=h100-8", "--json")


def test_a_plan_takes_as_much_longer_as_its_kernels(tmp_path, capsys):
  slower = dict.fromkeys(("matmul", "attention", "memory"), 1.5)
  seconds = []
  for factors in ({}, slower):
    file = profile(tmp_path / "mine.json", **factors)
    assert run(*PLAN, f"--calibrate={file}") == 0
    seconds.append(json.loads(capsys.readouterr().out)["plans"][0]["seconds"])
  before, after = seconds
  for cause in ("compute", "attention", "memory"):
    assert after[cause] == pytest.approx(1.5 * before[cause])
  assert run(*PLAN) == 0
  plain = json.loads(capsys.readouterr().out)["plans"][0]["seconds"]
  assert plain["total"] == pytest.approx(before["total"])


@pytest.mark.parametrize(
  ("text", "says"),
  [
    (None, "cannot be read: No such file or directory"),
    ("{", "is not the output of --mode=profile --json: JSONDecodeError Expecting"),
    ("[]", "is not the output of --mode=profile --json"),
    ('{"device_kind": "cpu", "kernels": [], "seconds": 1}', "is of cpu, which has no data sheet"),
    ('{"device_kind": "NVIDIA H100", "kernels": [], "seconds": 1}', "has no kernels whose rates"),
  ],
)
def test_other_files_are_refused(tmp_path, capsys, text, says):
  file = tmp_path / "mine.json"
  if text is not None:
    file.write_text(text)
  assert run(*PLAN, f"--calibrate={file}") == 2
  error = capsys.readouterr().err
  assert f"paxlike: --calibrate={file} {says}" in error and error.count("\n") == 1


def test_rates_of_another_chip_are_refused(tmp_path, capsys):
  file = profile(tmp_path / "mine.json", device_kind="NVIDIA A100-SXM4-80GB")
  assert run(*PLAN, f"--calibrate={file}") == 2
  assert "mine.json is of A100, and the plan of NVIDIA H100" in capsys.readouterr().err


def test_one_profile_is_not_for_several_kinds_of_devices(tmp_path, capsys):
  file = profile(tmp_path / "mine.json", device_kind="NVIDIA H100")
  assert run(*PLAN, "--topology=h100-8,a100-8", f"--calibrate={file}") == 2
  error = capsys.readouterr().err
  assert "mine.json is of one kind of device, --topology of several: a100, h100." in error
