# SPDX-License-Identifier: Apache-2.0
"""A run's folder decodes and evaluates from any working directory, and wherever it is moved."""

import json
import os
import shutil
import sys

import pytest
from helpers import newcomer
from helpers.program import finish, run, start

from paxlike import registry
from paxlike.cli import config_files
from paxlike.config import graph_file
from paxlike.convert.main import run as convert

slow = pytest.mark.slow


@pytest.mark.parametrize("name", [n for n in registry.registered() if "Synthetic" in n])
def test_what_is_saved_of_a_graph_without_paths_is_the_graph(name):
  graph = registry.find(name)().trainer()
  assert graph_file.dump(config_files.portable(graph)) == graph_file.dump(graph)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  """A folder in which an experiment of the user's was trained, all of its paths relative."""
  folder = tmp_path_factory.mktemp("home")
  newcomer.make(folder, "mine_travels")
  before = os.getcwd()
  os.chdir(folder)
  try:
    assert convert(["--from=hf", "--path=theirs", "--to=ours"]) == 0
    assert run("--fdl_config=mine_travels.Mine", "--job_log_dir=run") == 0
  finally:
    os.chdir(before)
    sys.modules.pop("mine_travels", None)
    sys.modules.pop("mine_travels_parts", None)
    sys.path.remove(str(folder))
  return folder


@slow
def test_the_folder_holds_tokenizer_and_code_and_no_relative_path(home):
  assert (home / "run" / "tokenizer" / "tokenizer_config.json").exists()
  assert (home / "run" / "code" / "mine_travels_parts.py").exists()
  knobs = json.loads((home / "run" / "experiment.json").read_text())["knobs"]
  assert knobs["VOCAB_PATH"] == "{run}/tokenizer/tokenizer.json"
  assert knobs["DATA_PATH"] == str(home / "chats.jsonl")
  assert str(home) in (home / "run" / "config.json").read_text()


@slow
@pytest.mark.parametrize("mode", [("decode", "--prompt=t6"), ("eval", "--fdl.TRAIN_SHARE=0.8")])
def test_a_moved_run_works_by_the_command_that_the_error_names(home, tmp_path, mode):
  moved = tmp_path / "elsewhere" / "run"
  shutil.copytree(home / "run", moved)
  flags = ("--job_log_dir=elsewhere/run", f"--mode={mode[0]}", *mode[1:])
  if mode[0] == "decode":
    hidden = tmp_path / "hidden"  # What the user has at home is not there any more.
    (home / "ours" / "tokenizer.json").rename(hidden)
  try:
    module = moved / "code" / "mine_travels.py"
    module.write_text("import pathlib\npathlib.Path('trace').touch()\n" + module.read_text())
    status, _, error = finish(start(*flags, cwd=tmp_path))
    assert not (tmp_path / "trace").exists()
    assert status == 2 and f"a copy is in {moved / 'code'}" in error
    assert "Traceback" not in error
    (hint,) = [word for word in error.split() if word.startswith("--fdl_allow_modules=")]
    status, out, error = finish(start(*flags, hint, cwd=tmp_path))
    assert status == 0, error
    assert ("tokens/s" if mode[0] == "decode" else "evaluated validation") in out
  finally:
    if mode[0] == "decode":
      hidden.rename(home / "ours" / "tokenizer.json")


@slow
def test_going_on_from_another_folder_changes_nothing(home, tmp_path, monkeypatch, capsys):
  shutil.copytree(home / "run", tmp_path / "run")
  monkeypatch.chdir(home)
  monkeypatch.setattr(sys, "path", [*sys.path])
  flags = ("--fdl_config=mine_travels.Mine", f"--job_log_dir={tmp_path / 'run'}")
  assert run(*flags, "--fdl.MAX_STEPS=2", "--fdl.LR_COS_DECAY_END=1") == 0
  out = capsys.readouterr().out
  assert "num_steps" in out and "path" not in out.partition("parameters:")[0]


@slow
def test_an_export_from_another_folder_has_the_tokenizer(home, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  monkeypatch.delitem(sys.modules, "mine_travels", raising=False)  # Not yet imported.
  flags = ["--from=paxlike", f"--path={home / 'run'}", "--to=back"]
  assert convert(flags) == 2
  error = capsys.readouterr().err.split()
  (hint,) = [word for word in error if word.startswith("--fdl_allow_modules=")]
  assert convert([*flags, hint]) == 0
  assert (tmp_path / "back" / "tokenizer.json").exists()
