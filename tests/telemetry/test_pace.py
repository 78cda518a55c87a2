# SPDX-License-Identifier: Apache-2.0
"""The figures are those of NVIDIA's Llama2-70B recipe for H100 GPUs, at 4,096 tokens a sequence."""

import types
from typing import Any

import numpy as np
import pytest

from paxlike.layers.flops import TrainingFlops
from paxlike.telemetry.pace import Pace, typical
from paxlike.telemetry.run_header import RunHeader
from paxlike.telemetry.step_metrics import Reading

SEQ_LEN = 4096
FULL = 1.82e15 / SEQ_LEN


def header(matmul_dtype: str, *, num_devices: int = 64) -> RunHeader:
  chip = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
  devices: Any = types.SimpleNamespace(size=num_devices, devices=np.array([chip]), shape={})
  return RunHeader(
    num_params=1,
    num_trained=1,
    batch_size=2 * num_devices,
    seq_len=SEQ_LEN,
    devices=devices,
    flops=TrainingFlops(full=FULL, causal=0.96 * FULL),
    attention="cudnn",
    matmul_dtype=matmul_dtype,
  )


@pytest.mark.parametrize(
  ("matmul_dtype", "seconds", "tokens", "mfu", "days"),
  [("bfloat16", 6.999, 74908.99, 0.5259, 154.51), ("fp8", 4.324, 121250.69, 0.4254, 95.46)],
)
def test_speed_is_counted_as_the_published_table_does(matmul_dtype, seconds, tokens, mfu, days):
  speed = header(matmul_dtype).speed(seconds)
  assert speed["tokens_per_second"] == pytest.approx(tokens, rel=1e-4)
  assert speed["mfu_full"] == pytest.approx(mfu, rel=1e-3)
  pace = Pace(header(matmul_dtype), num_steps=10, skip=2, target_tokens=1e12)
  for step in range(10):
    pace.add(Reading(step, {}, 1.0, None if step in (0, 5) else 100.0 if step < 2 else seconds))
  text = pace.text() or ""
  assert "(median of 7 steps; the first 2 are left out)" in text
  assert float(text.split("% MFU (full")[0].split()[-1]) == pytest.approx(100 * mfu, rel=1e-3)
  assert float(text.split("tokens take ")[1].split()[0]) == pytest.approx(days, rel=1e-3)


def test_the_time_left_includes_all_but_the_first_steps(monkeypatch):
  clock = iter([100.0, 160.0])
  monkeypatch.setattr("time.perf_counter", lambda: next(clock))
  pace = Pace(header("bfloat16"), num_steps=100, skip=3)
  for step in (0, 1, 2):
    pace.add(Reading(step, {}, 1.0, 1.0))
    assert pace.left(step) is None
  for step in (3, 4, 5):
    pace.add(Reading(step, {}, 1.0, 1.0))
  assert pace.left(5) == pytest.approx(60 / 2 * 94)


def test_a_target_without_a_speed_is_explained():
  pace = Pace(header("bfloat16"), num_steps=3, skip=5, target_tokens=1e12)
  assert pace.text() is None and Pace(header("bfloat16"), num_steps=1).text() is None
  for step in (0, 1, 2):
    pace.add(Reading(step, {}, 1.0, 1.0))
  reason = "all 3 steps are within SPEED_SKIP_STEPS=5"
  assert pace.text() == f"no speed for TARGET_TOKENS: {reason}"


def test_the_first_fifth_of_a_run_is_not_typical():
  records = [{"kind": "train", "speed": speed} for speed in (1, 1, 5, 6, 7, 5, 6, 7, 6, 6)]
  records += [{"kind": "eval", "speed": 100}, {"kind": "train", "speed": None}]
  assert typical(records, "speed") == 6 and typical(records, "none") is None
