# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu.py, as far as a machine without a GPU can run it."""

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from helpers.sources import REPOSITORY

from benchmarks import gpu_ours, gpu_suites
from paxlike import fiddlers, layers, registry, run_mode
from paxlike.compilation import aot

SCRIPT = REPOSITORY / "benchmarks" / "gpu.py"


def run(*flags: str) -> subprocess.CompletedProcess:
  command = [sys.executable, str(SCRIPT), *flags]
  # No devices but the one that a machine has.
  environment = os.environ | {"XLA_FLAGS": ""}
  return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    (("--budget=9", "--only=["), "gpu.py: --only=[: no pattern: unterminated"),
    (("--budget=9", "--only=huge"), "gpu.py: --only=huge: none of roofline, tiny-gpt-b2-ours"),
    (("--budget=-1",), "gpu.py: --budget=-1: expected seconds"),
    (("--budget=0",), "gpu.py: --budget=0: expected seconds"),
    (("--budget=nan",), "gpu.py: --budget=nan: expected seconds"),
  ],
)
def test_a_mistake_is_answered_in_one_line(flags, says):
  done = run("--suite=tiny", *flags)
  assert done.returncode == 2
  assert done.stdout == ""
  assert done.stderr.startswith(says) and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_suite_measures_both_sides_and_compares_them(tmp_path):
  done = run("--suite=tiny", "--only=tiny-gpt", "--budget=600", f"--output={tmp_path}")
  assert done.returncode == 0, done.stdout + done.stderr
  results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
  names = [f"tiny-gpt-b2-{name}" for name in ("ours", "torch", "ours-again")]
  assert [result["case"] for result in results] == names
  for result in results:
    assert result["first_loss"] == pytest.approx(math.log(512), abs=0.1)
    assert math.isfinite(result["last_loss"])
    assert result["step_seconds"] > 0
    assert result["tokens_per_second"] == pytest.approx(2 * 64 / result["step_seconds"])
    assert result["dtypes"] == "float32 / float32"
  first, peer, again = (result["tokens_per_second"] for result in results)
  ratio = (first + again) / 2 / peer
  row = f"| tiny-gpt, 2 | {(first + again) / 2:,.0f} | "
  table = (tmp_path / "table.md").read_text()
  assert table in done.stdout
  assert any(
    line.startswith(row) and line.endswith(f" {ratio:.3f} |") for line in table.split("\n")
  )


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


@pytest.mark.slow
def test_products_of_blocks_that_are_not_in_fp8_are_told(h200):
  knobs = {"USE_REPEATED_LAYER": False, "CHECKPOINT_POLICY": "SAVE_EVERYTHING"}
  graph = registry.find("Synthetic126M")(USE_FP8=True, **knobs).trainer()
  fiddlers.shrink(graph)
  for node in fiddlers.select(graph, layers.Linear, "up"):
    node.dot = None
  trainer = run_mode.build_trainer(graph)
  program = aot.compile_step(trainer)
  _, told = gpu_ours.contents(program, program.text, trainer.definition, fp8=True, gpu=True)
  assert told == ["0.136 of the products of blocks are not in FP8"]
