# SPDX-License-Identifier: Apache-2.0
"""Whoever reads the folder of a run runs no code that it names, unless the user allows it."""

import json
import sys

import numpy as np
import pytest

from paxlike.convert.main import run
from paxlike.convert.safetensors_files import TensorSpec, write_file
from paxlike.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The folder of a run whose graph and experiment are of a module of the working directory."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  (tmp_path / "trap_run.py").write_text(
    "import pathlib\nfrom paxlike.experiments import gpt\npathlib.Path('trace').touch()\n"
    "class Model(gpt.Synthetic126M): pass\n"
  )
  graph = {
    "config": "paxlike.training:Trainer",
    "arguments": {"model": {"config": "trap_run:Model"}},
  }
  path = tmp_path / "run"
  path.mkdir()
  (path / "config.json").write_text(json.dumps({"paxlike_graph": 1, "graph": graph}))
  (path / "experiment.json").write_text('{"experiment": "trap_run.Model", "knobs": {}}')
  (path / "peft").mkdir()
  adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
  (path / "peft" / "adapter_config.json").write_text(json.dumps(adapter))
  specs = {"a": TensorSpec((2, 2), np.dtype("float32"))}
  write_file(path / "peft" / "adapter_model.safetensors", specs, lambda name: np.zeros((2, 2), "f"))
  yield path
  sys.modules.pop("trap_run", None)


@pytest.mark.parametrize(
  "flags", [("--from=paxlike", "--path=run"), ("--from=peft", "--path=run/peft", "--base=run")]
)
def test_a_converter_imports_nothing_that_a_run_names(folder, flags, capsys):
  assert run([*flags, "--to=made"]) == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert "--fdl_allow_modules=trap_run" in line
  assert not (folder.parent / "trace").exists()
  assert not (folder.parent / "made").exists()


def test_a_converter_imports_what_the_user_allows(folder, capsys):
  flags = ["--from=paxlike", "--path=run", "--to=made", "--fdl_allow_modules=other,trap_run"]
  assert run(flags) == 2
  assert "no checkpoint in" in capsys.readouterr().err
  assert (folder.parent / "trace").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_harness_builds_nothing_that_a_run_names(folder):
  harness = pytest.importorskip("paxlike.cli.harness")
  with pytest.raises(UserError, match="--fdl_allow_modules=trap_run"):
    harness.PaxlikeLM(folder=str(folder))
  assert not (folder.parent / "trace").exists()
