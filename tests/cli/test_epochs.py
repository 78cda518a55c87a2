# SPDX-License-Identifier: Apache-2.0
"""NUM_EPOCHS: a run as long as its data, so and so often."""

import json
import re

import pytest
from helpers.program import TEXT, TINY, run


@pytest.fixture
def flags(tmp_path, text):
  return (*TEXT, f"--fdl.DATA_PATH={text}", f"--job_log_dir={tmp_path / 'run'}")


def steps(folder):
  return json.loads((folder / "status.json").read_text())["step"]


@pytest.mark.slow
def test_a_run_ends_after_so_many_epochs(tmp_path, flags, capsys):
  assert run(*flags, "--fdl.NUM_EPOCHS=1.5") == 0
  out = capsys.readouterr().out
  rows, per_epoch, tokens = re.findall(
    r"epoch: +(\d+) sequences = (\S+) steps = (\S+) tokens", out
  )[0]
  assert int(tokens.replace(",", "")) == 16 * int(rows)
  assert float(per_epoch) == pytest.approx(int(rows) / 8, rel=1e-3)
  assert steps(tmp_path / "run") == -(-3 * int(rows) // 16)
  knobs = json.loads((tmp_path / "run" / "experiment.json").read_text())["knobs"]
  assert (knobs["NUM_EPOCHS"], int(knobs["MAX_STEPS"])) == ("None", steps(tmp_path / "run"))
  before = steps(tmp_path / "run")
  assert run(*flags, "--fdl.NUM_EPOCHS=1.5") == 0  # The same command goes on, and has ended.
  assert steps(tmp_path / "run") == before
  assert "changed since" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_cooldown_and_models_to_compare_may_be_as_long(tmp_path, flags, text, capsys):
  own = tuple(flag for flag in flags if not re.search("LR_COS|job_log_dir", flag))
  wsd = ("--fdl.LR_SCHEDULE=wsd", "--fdl.LR_WARMUP=2", "--fdl.CHECKPOINT_EVERY_N_STEPS=3")
  assert run(*own, *wsd, "--fdl.MAX_STEPS=3", f"--job_log_dir={tmp_path}/run") == 0
  source = f"--fdl.DECAY_FROM={tmp_path}/run/checkpoints/checkpoint_00000003"
  longer = (*wsd, source, "--fdl.NUM_EPOCHS=0.5", f"--job_log_dir={tmp_path}/cooldown")
  assert run(*own, *longer) == 0
  length = steps(tmp_path / "cooldown")
  assert length > 3
  assert run(*own, *longer[:-2], "--fdl.NUM_EPOCHS=0.01", f"--job_log_dir={tmp_path}/x") == 2
  assert "its step is not below MAX_STEPS=1." in capsys.readouterr().err
  models = [flag for flag in own if "DIMS_PER_HEAD" not in flag]
  given = ("--mode=transfer", "--widths=16,32", "--fdl.NUM_LAYERS=1", "--fdl.NUM_EPOCHS=0.5")
  assert run(*models, *given) == 0
  assert f"after {length} steps of" in capsys.readouterr().out
  models = [flag for flag in models if not re.search("LEARNING_RATE|NUM_LAYERS", flag)]
  rates = ("--rates=0.01,0.02,0.04", "--fdl.PARAMETRIZATION=completep")
  assert run(*models, *given[:2], "--depths=1", given[-1], *rates) == 0
  assert f" of {length} steps of" in capsys.readouterr().out


def test_both_are_an_error_that_names_both(flags, capsys):
  assert run(*flags, "--fdl.NUM_EPOCHS=2", "--fdl.MAX_STEPS=7") == 2
  error = capsys.readouterr().err
  assert "NUM_EPOCHS=2" in error and "MAX_STEPS=7" in error and error.count("\n") == 1


def test_data_without_end_have_no_epochs(tmp_path, capsys):
  assert run(*TINY, f"--job_log_dir={tmp_path / 'run'}", "--fdl.NUM_EPOCHS=2") == 2
  assert "set MAX_STEPS" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()
