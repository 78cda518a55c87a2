# SPDX-License-Identifier: Apache-2.0
"""Runs that older versions left behind are evaluated and resumed, with their numbers.

Each archive (golden/make.py) is a run that was killed after two of four updates, beside the losses
and evaluations of one that was not. They are never made anew: who moves or renames what they name
adds an alias.
"""

import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from helpers import archives
from helpers.program import run

GOLDEN = pathlib.Path(__file__).parent / "golden"
EVALUATED = ("log_pplx", "fraction_of_correct_next_step_preds", "num_predictions")
# Each kind of layout, optimizer state and side data; all are evaluated.
RESUMED = {"gpt", "gpt_unrolled", "gpt_pipelined", "llama_lora", "llama_fp8"}
RESUMED |= {"deepseek", "mixtral_capacity", "gemma2"}
pytestmark = pytest.mark.slow


def records(folder: pathlib.Path, kind: str) -> dict[int, dict[str, Any]]:
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  found = [record for record in map(json.loads, lines) if record["kind"] == kind]
  return {record["updates"]: record for record in found}


@pytest.mark.parametrize(
  "archive", sorted(GOLDEN.glob("*.tar.xz")), ids=lambda path: path.name.partition(".")[0]
)
def test_an_older_run_is_evaluated_and_resumed(archive, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(GOLDEN)  # The run names its text relative to it.
  archives.extract(archive, tmp_path)
  (folder,) = tmp_path.iterdir()
  losses, evaluations = records(folder, "train"), records(folder, "eval")
  assert len(losses) == 4 and len(evaluations) == 2

  shutil.rmtree(folder / "eval_out")
  assert run(f"--job_log_dir={folder}", "--mode=eval") == 0
  (evaluated,) = (folder / "eval_out" / "validation").glob("eval_00000002.json")
  found = json.loads(evaluated.read_text())
  for name in EVALUATED:
    np.testing.assert_allclose(found[name], evaluations[2][name], rtol=1e-5, err_msg=name)
  if archive.name.partition(".")[0] not in RESUMED:
    return
  again = f"--fdl_config_file={folder / 'config.json'}"
  (folder / "metrics.jsonl").unlink()
  assert run(again, f"--job_log_dir={folder}") == 0
  assert "changed since the run began" not in capsys.readouterr().out
  resumed = records(folder, "train")
  assert list(resumed) == [3, 4]
  for updates, record in resumed.items():
    np.testing.assert_allclose(record["loss"], losses[updates]["loss"], rtol=1e-5)
  found = records(folder, "eval")[4]
  for name in EVALUATED:
    np.testing.assert_allclose(found[name], evaluations[4][name], rtol=1e-5, err_msg=name)
