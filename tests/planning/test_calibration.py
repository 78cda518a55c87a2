# SPDX-License-Identifier: Apache-2.0
"""How the published rows come out, and the errors and constants that they give."""

import dataclasses
import re
from typing import Any

import calibration
import published
import pytest
from helpers.configurations import on, sizes
from helpers.sources import REPOSITORY
from published import Row

from paxlike.devices import chips
from paxlike.devices.kernel_rates import Fitted
from paxlike.layers.pipeline.spec import Pipeline
from paxlike.planning import accuracy


@pytest.mark.slow
def test_published_steps_come_out_as_recorded():
  """The errors that docs/results.md states of the fitted constants."""
  results = [calibration.result(row) for row in published.load()]
  assert len(results) == 244
  page = calibration.page(results)
  (line,) = [line for line in page.splitlines() if line.startswith("all ")]
  mean, median = re.findall(r"([\d.]+) %", line)[:2]
  recorded = (REPOSITORY / "docs" / "results.md").read_text()
  assert re.search(rf"^\| all \| 244 \| \d+ \| {mean} % \| {median} % ", recorded, re.M)
  assert "JaxPP 175B BF16, 64 H100" in page and f"{len(calibration.KNOWN)} fitted" in page


def test_expected_errors_are_those_of_the_sources_that_were_held_out():
  page = (REPOSITORY / "docs" / "results.md").read_text()
  rows = re.findall(
    r"^\| ([^|]+) \|(?: [^|]+ \|){5} ([\d.]+) % \| [\d.]+ % \| [^|]+ \|$", page, re.M
  )
  recorded = {name: pytest.approx(float(error) / 100) for name, error in rows}
  dense, experts = sizes("SyntheticLLaMA70B"), sizes("Mixtral8x7B")
  in_fp8 = sizes("SyntheticLLaMA70B", USE_FP8=True)
  stages = dataclasses.replace(
    on(64, pipeline=8), pipeline=Pipeline(schedule="1f1b", stages=8, microbatches=8)
  )
  for chip in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", "H100", "A100"):
    sheet: Any = chips.find(chip)
    assert accuracy.expected_error(dense, on(64, fsdp=8), sheet) == recorded[chip]
  sheet = chips.find("A100")
  cases: dict[str, Any] = {"TP": (dense, on(64, tensor=8))}
  cases |= {"FP8": (in_fp8, on(64, fsdp=8)), "MoE": (experts, on(64, fsdp=8))}
  for group, (model, how) in cases.items():
    assert accuracy.expected_error(model, how, sheet) == recorded[group]
  assert accuracy.expected_error(dense, stages, sheet) == recorded["PP"]
  # None of them is a loop over ticks; these are compared with compiled programs.
  assert "mean difference between both is 9.0 % (median 6.5 %)" in page.replace("\n", " ")
  blackwell: Any = chips.find("B200")
  found = accuracy.expected_error(dense, on(64, fsdp=8), blackwell)
  assert recorded["GB200"].expected < found < recorded["B200"].expected


@pytest.mark.slow
def test_constants_that_made_the_times_are_found_again():
  """From steps that the model itself predicts, the fit finds the constants."""
  true = dataclasses.replace(Fitted(), h100=0.66, contention=0.3)
  rows = [row for row in published.load() if row.source.startswith(("NeMo 24", "MaxText GPU"))]
  made = [
    Row(facts={**row.facts, "published_seconds": calibration.result(row, true).times.total})
    for row in rows
  ]
  found = calibration.Fit(made, rounds=4)
  errors = [calibration.result(row, found.fitted).error for row in made]
  assert max(map(abs, errors)) < 0.03 and found.fitted.h100 == pytest.approx(0.66, rel=0.05)
  # Times that are held out do not count: neither right nor wrong ones.
  wrong = [
    Row(facts={**row.facts, "published_seconds": 9.0}) if row.source == "MaxText GPU" else row
    for row in made
  ]
  held_out = calibration.Fit(wrong, rounds=4).without("MaxText GPU")
  assert held_out.h100 == pytest.approx(found.without("MaxText GPU").h100, rel=0.02)
