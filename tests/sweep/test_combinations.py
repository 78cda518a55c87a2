# SPDX-License-Identifier: Apache-2.0
"""The combinations of a sweep, and what is refused before anything runs."""

import json
import os
import pathlib
import re

import pytest
from etils import epath

from paxlike.errors import UserError
from paxlike.processes.lease import Lease
from paxlike.sweep import combinations, main
from paxlike.telemetry import metric_files

TINY = ("--fdl_config=Gpt3_52k", "--fdl.MAX_STEPS=2")


def test_lists_may_hold_lists_and_quoted_commas():
  flags = ["--sweep.ICI_MESH_SHAPE=[[1,1,1],[2,1,1]]", "--fdl.X=1", "--sweep.a.b=['x,y', {a: 1}]"]
  swept, rest = combinations.lists(flags)
  assert swept == {"ICI_MESH_SHAPE": ["[1,1,1]", "[2,1,1]"], "a.b": ["'x,y'", "{a: 1}"]}
  assert rest == ["--fdl.X=1"]


def test_grid_has_all_combinations_and_zip_those_in_step():
  swept = {"A": ["1", "2"], "B": ["x", "y"]}
  grid = combinations.joined(swept, [], in_step=False)
  assert grid == [{"A": a, "B": b} for a in "12" for b in "xy"]
  assert combinations.joined(swept, [], in_step=True) == [
    {"A": "1", "B": "x"},
    {"A": "2", "B": "y"},
  ]
  listed = [{"C": "3"}, {"D": "4"}]
  both = combinations.joined({"A": ["1", "2"]}, listed, in_step=False)
  assert both == [one | {"A": a} for one in listed for a in "12"]
  assert combinations.joined({}, listed, in_step=False) == listed


def test_file_holds_a_list_of_mappings(tmp_path):
  file = tmp_path / "list.json"
  file.write_text(json.dumps([{"A": 1e-3, "B": [2, 1]}, {"A": "x", "C": None, "D": True}]))
  assert combinations.read(str(file)) == [
    {"A": "0.001", "B": "[2,1]"},
    {"A": "x", "C": "None", "D": "True"},
  ]
  for text in ("{}", "[]", "[1]", "[{}]", "nonsense"):
    file.write_text(text)
    with pytest.raises(UserError, match=r"--combinations=.*list\.json"):
      combinations.read(str(file))
  with pytest.raises(UserError, match="cannot be read"):
    combinations.read(str(tmp_path / "none.json"))


def test_a_name_is_that_of_the_values_whatever_the_other_combinations_are():
  every = [
    {"A": "1e-3", "B": "[2,1]"},
    {"A": "1", "B": "x/../y"},
    {"A": "1", "B": "x:..:y"},
    {"A": "[1]"},
    {"A": "(1)"},
    {"A": "x" * 500},
    {"A": "x" * 501},
  ]
  names = list(combinations.named(every))
  assert names == [name for one in every for name in combinations.named([one])]
  assert names[0] == "A=1e-3,B=2,1"
  assert names[1].startswith("A=1,B=x_.._y,") and "/" not in "".join(names)
  assert max(map(len, names)) < 140
  with pytest.raises(UserError, match="A=2,1 is given twice"):
    combinations.named([{"A": "[2,1]"}, {"A": "(2,1)"}])


@pytest.mark.parametrize(
  "flags, message",
  [
    ([], r"what to sweep\? Give --sweep\.NAME="),
    (["--sweep.LEARNING_RATE=1e-3"], r"expected a list, such as \[1e-3\]"),
    (["--sweep.LEARNING_RATE=[]"], "the list is empty"),
    (["--sweep.LEARNING_RATE=[1e-3,,2e-3]"], "value 2 is empty"),
    (["--sweep.LEARNING_RATE"], r"expected --sweep\.NAME=\[VALUE,VALUE,\.\.\.\]"),
    (["--sweep.LEARNING_RATE=[1]", "--sweep.LEARNING_RATE=[2]"], "is given twice"),
    (["--sweep.LEARNING_RATE=[1]", "--fdl.LEARNING_RATE=2"], r"--sweep\.LEARNING_RATE sets it too"),
    (["--sweep.LEARNING_RAT=[1]"], r"LEARNING_RAT=1: no knob LEARNING_RAT .*mean LEARNING_RATE\?"),
    (["--sweep.NUM_LAYERS=[2,x]"], r"NUM_LAYERS=x: --fdl\.NUM_LAYERS=x: expected an int"),
    (["--sweep.optimizer.b22=[0.9]"], r"b22"),
    (["--sweep.LORA_RANK=[2]"], "LORA_RANK has no effect"),
    (
      ["--sweep.LEARNING_RATE=[1e-3,0.001]"],
      r"LEARNING_RATE=1e-3 and LEARNING_RATE=0\.001 are the",
    ),
    (["--sweep.NUM_LAYERS=[1,2]", "--sweep.NUM_HEADS=[1]", "--zip"], "NUM_LAYERS has 2, NUM_HEADS"),
    (["--sweep.NUM_LAYERS=[1]", "--mode=show"], "paxlike-sweep trains"),
    (["--sweep.NUM_LAYERS=[1]", "--sweeep"], "unknown flag --sweeep"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurn"], "no target slurn: expected one of slurm"),
    (["--sweep.NUM_LAYERS=[1]", "--launch="], "expected a target"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurm --nods=2"], r"--launch=slurm --nods=2"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurm --submit"], "leave out --submit"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurm --to=x"], "leave out --to=x"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurm --to x"], "leave out --to"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurm --help"], "leave out --help"),
    (["--sweep.NUM_LAYERS=[1]", "--launch=slurm -h"], "leave out -h"),
    (["--sweep.NUM_LAYERS=[1,2]", "--launch=slurm --name=x"], "leave out --name"),
  ],
)
def test_mistakes_are_named_before_anything_is_written(tmp_path, capsys, flags, message):
  folder = tmp_path / "sweep"
  assert main.run([*TINY, *flags, f"--job_log_dir={folder}"]) == 2
  error = capsys.readouterr().err
  assert error.splitlines()[-1].startswith("paxlike-sweep: ")
  assert re.search(message, error), error
  assert not folder.exists()


def test_folder_is_named(capsys):
  assert main.run([*TINY, "--sweep.NUM_LAYERS=[1]"]) == 2
  assert "--job_log_dir" in capsys.readouterr().err


def test_folder_of_a_run_or_of_another_sweep_is_refused(tmp_path, capsys):
  def refused(folder: pathlib.Path) -> str:
    assert main.run([*TINY, "--sweep.NUM_LAYERS=[1]", f"--job_log_dir={folder}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line

  (tmp_path / "metrics.jsonl").write_text("")
  assert "is the folder of a run: set another one" in refused(tmp_path)
  folder = tmp_path / "sweep"
  folder.mkdir()
  saved = {"flags": list(TINY), "runs": {"NUM_LAYERS=2": {"NUM_LAYERS": "2"}}}
  for change, what in (
    ({}, "with a run NUM_LAYERS=2"),
    ({"flags": ["--fdl_config=Gpt3_52k"]}, r"without --fdl.MAX_STEPS=2"),
    ({"flags": [*TINY, "--fdl.RANDOM_SEED=3"]}, "with --fdl.RANDOM_SEED=3"),
  ):
    (folder / "sweep.json").write_text(json.dumps(saved | change))
    assert f"holds another sweep, {what}" in refused(folder)
  for text in ("{", "[]", "{}", '{"flags": 1, "runs": {}}', '{"flags": [], "runs": []}'):
    (folder / "sweep.json").write_text(text)
    assert "sweep.json is damaged: expected JSON with flags and runs. Restore" in refused(folder)
  lease = Lease(epath.Path(folder))
  assert f"--job_log_dir={folder} is in use: process {os.getpid()} on " in refused(folder)
  lease.release()


def test_folder_that_cannot_be_used_is_named(tmp_path, capsys, monkeypatch):
  def refused() -> str:
    flags = [*TINY, "--sweep.NUM_LAYERS=[1]", f"--job_log_dir={tmp_path}"]
    assert main.run(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line

  (tmp_path / "logs").write_text("")
  assert "logs: File exists. Fix that or set another --job_log_dir" in refused()
  (tmp_path / "logs").unlink()
  (tmp_path / "logs" / "NUM_LAYERS=1.txt").mkdir(parents=True)  # As one without permission.
  assert "logs/NUM_LAYERS=1.txt: Is a directory. Fix that or set another" in refused()

  def out_of_reach(folder: epath.Path):
    raise OSError("out of reach")

  monkeypatch.setattr(metric_files, "files", out_of_reach)
  assert f"{tmp_path} cannot be read: out of reach" in refused()
