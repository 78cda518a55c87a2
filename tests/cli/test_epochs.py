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


def test_both_are_an_error_that_names_both(flags, capsys):
  assert run(*flags, "--fdl.NUM_EPOCHS=2", "--fdl.MAX_STEPS=7") == 2
  error = capsys.readouterr().err
  assert "NUM_EPOCHS=2" in error and "MAX_STEPS=7" in error and error.count("\n") == 1


def test_data_without_end_have_no_epochs(tmp_path, capsys):
  assert run(*TINY, f"--job_log_dir={tmp_path / 'run'}", "--fdl.NUM_EPOCHS=2") == 2
  assert "set MAX_STEPS" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()
