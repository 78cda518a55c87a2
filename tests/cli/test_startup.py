# SPDX-License-Identifier: Apache-2.0
"""What the program loads and compiles before the first step."""

import json
import os
import subprocess
import sys

import pytest
from helpers.program import TINY
from helpers.sources import REPOSITORY

HEAVY = ("tensorflow", "tensorflow_datasets", "seqio", "torch", "transformers", "datasets")
HEAVY += ("tokenizers", "sentencepiece", "matplotlib", "grain", "tensorboard", "lm_eval", "peft")
CODE = """
import gc, json, sys
from paxlike.main import run
try:
  run()
except SystemExit as ended:
  status = ended.code
names = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps([status, gc.isenabled(), names]))
"""


def modules(*flags: str) -> set[str]:
  """Returns the packages that the program has imported when it ends."""
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  command = [sys.executable, "-c", CODE, *flags]
  done = subprocess.run(command, env=own, capture_output=True, text=True, check=True)
  status, collects_garbage, names = json.loads(done.stdout.splitlines()[-1])
  assert status == 0, done.stderr
  assert collects_garbage or "--help" in flags
  return set(names)


def test_help_needs_no_jax():
  assert not {*HEAVY, "jax", "flax", "fiddle", "numpy"} & modules("--help")


@pytest.mark.parametrize("experiment", [TINY, ["--fdl_config=Synthetic175B"]])
def test_show_needs_no_checkpoints_and_nothing_heavy(experiment):
  assert not {*HEAVY, "clu", "orbax", "tensorboardX"} & modules(*experiment, "--mode=show")


@pytest.mark.slow
def test_training_needs_nothing_heavy_and_compiles_once(tmp_path, monkeypatch):
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path))
  kept = []
  for name in ("first", "second"):
    flags = (*TINY, "--fdl.MAX_STEPS=2", f"--job_log_dir={tmp_path / name}")
    assert not {*HEAVY} & modules(*flags)
    kept.append({path.name for path in (tmp_path / "xla").iterdir()})
  assert len(kept[0]) > 5 and kept[1] == kept[0]
