# SPDX-License-Identifier: Apache-2.0
import json
import os
import sys

import pytest

from paxlike import registry
from paxlike.config import graph_file
from paxlike.errors import UserError
from paxlike.experiments import gpt


def test_a_name_a_suffix_and_a_path_find_the_same_experiment():
  for name in ("Synthetic126M", "gpt.Synthetic126M", "paxlike.experiments.gpt.Synthetic126M"):
    assert registry.find(name) is gpt.Synthetic126M
  assert registry.find("paxlike.scripts_gpu.configs.Synthetic126M") is gpt.Synthetic126M


def test_every_registered_short_name_is_unique():
  names = [path.rpartition(".")[2] for path in registry.registered()]
  assert len(set(names)) == len(names)
  for name in names:
    assert registry.find(name).__name__ == name


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("Synthetic126", "Did you mean Synthetic126M?"),
    ("paxlike.experiments.gpt.Synthetic127M", "Did you mean Synthetic126M?"),
    ("no_such_module.Gpt", "no module no_such_module"),
    ("os.getcwd", "not a subclass of paxlike.experiment.Experiment"),
    *(
      (name, f"--fdl_config={name}: expected NAME or") for name in ("..", ".", ".Gpt3_52k", "a b.C")
    ),
  ],
)
def test_mistakes_are_named(name, says):
  with pytest.raises(UserError) as error:
    registry.find(name)
  assert says in str(error.value)


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("Llama2_7B", "Llama2_7B is a model without data: use --exp=SyntheticLLaMA7B or --exp=LLaMA7B"),
    ("Gpt175B", "use --exp=Synthetic175B or --exp=Pile175B or --exp=C4Gpt175B, or a class of"),
    ("GLaM", "use --exp=SyntheticGLaM126M64E or --exp=SyntheticGLaM64B64E or --exp="),
    ("LocalText", "data alone: use --exp=Text126M, or a class of yours"),
    ("Jsonl", "Jsonl is data alone: use a class of yours that adds a model (docs/adding.md)."),
  ],
)
def test_an_incomplete_experiment_names_those_that_complete_it(name, says):
  with pytest.raises(UserError) as error:
    registry.find(name, flag="exp")
  assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("own_file.py", "Did you mean --fdl_config=own_file.A or --fdl_config=own_file.B?"),
    ("own_folder/file.py", "Did you mean --fdl_config=own_folder.file.C?"),
    ("none.py", "none.py has no experiment."),
    ("own_file.NoSuch", "own_file has no NoSuch. It has: A, B."),
  ],
)
def test_the_name_of_a_file_is_not_that_of_an_experiment(name, says, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
  first = "from paxlike.experiments.gpt import Gpt126M\nclass {}(Gpt126M): pass\n"
  (tmp_path / "own_file.py").write_text(f"{first.format('A')}class B(A): pass\n")
  (tmp_path / "own_folder").mkdir()
  (tmp_path / "own_folder" / "__init__.py").touch()
  (tmp_path / "own_folder" / "file.py").write_text(first.format("C"))
  with pytest.raises(UserError) as error:
    registry.find(name)
  assert says in str(error.value)
  sys.modules.pop("own_file", None)


def test_a_module_that_fails_says_why(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / "broken_experiments.py").write_text("import a_package_that_is_missing\n")
  with pytest.raises(UserError, match=r"importing broken_experiments failed: .*is_missing"):
    registry.find("broken_experiments.Gpt")


@pytest.fixture
def trap(tmp_path, monkeypatch):
  """A module in the working directory that leaves a trace when it is imported."""
  trace = tmp_path / "trace"
  (tmp_path / "trap_experiments.py").write_text(
    f"import pathlib\npathlib.Path({str(trace)!r}).touch()\n"
    "from paxlike.experiments import gpt\nclass Mine(gpt.Synthetic126M):\n  NUM_LAYERS = 1\n"
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  yield trace
  sys.modules.pop("trap_experiments", None)


def experiment_file(folder, name, knobs=None):
  path = folder / "experiment.json"
  path.write_text(json.dumps({"experiment": name, "knobs": knobs or {}}))
  return path


@pytest.mark.parametrize("name", ["trap_experiments.Mine", "os.getcwd", "paxlike.main.main", "x"])
def test_a_file_names_only_experiments_of_the_package(trap, tmp_path, name):
  path = experiment_file(tmp_path, name)
  with pytest.raises(UserError, match=f"--fdl_allow_modules={name.rpartition('.')[0]}"):
    registry.load(path, allow_modules=["trap", "trap_experiments.sub", ""])
  assert not trap.exists()
  assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
  ("name", "knobs", "says"),
  [
    ("paxlike.experiments..x", {}, "the experiment paxlike.experiments..x: no module"),
    ("paxlike.experiments.gpt.Nothing", {}, "paxlike.experiments.gpt has no Nothing"),
    ("paxlike.experiments.gpt.datasets", {}, "gpt.datasets is not a subclass"),
    ("Synthetic126M", {"NO_SUCH": "1"}, "NO_SUCH"),
    ("Synthetic126M", {"NUM_LAYERS": "x"}, "NUM_LAYERS='x': expected"),
  ],
)
def test_a_mistake_in_a_file_is_blamed_on_the_file(tmp_path, name, knobs, says):
  path = experiment_file(tmp_path, name, knobs)
  with pytest.raises(UserError) as error:
    registry.load(path)
  assert str(error.value).startswith(f"{path}: ") and says in str(error.value)
  assert "--fdl_config" not in str(error.value)


def test_a_file_names_what_the_user_allows(trap, tmp_path):
  path = experiment_file(tmp_path, "trap_experiments.Mine", {"NUM_LAYERS": "3"})
  found = registry.load(path, allow_modules=["trap_experiments"])
  assert trap.exists()
  assert found.NUM_LAYERS == 3
  path.write_text(registry.dump(gpt.Gpt126M(NUM_LAYERS=2)))
  assert type(registry.load(path)) is gpt.Gpt126M  # Not registered, but the package's.


def test_a_pipe_is_not_waited_for(tmp_path):
  os.mkfifo(tmp_path / "experiment.json")
  for read in (registry.load, graph_file.read, graph_file.read_data):
    with pytest.raises(UserError, match="is a pipe or a device"):
      read(tmp_path / "experiment.json")


@pytest.mark.parametrize("text", ["", "[]", '{"experiment": 1}', "[" * 10**5, "\xff\xfe"])
def test_a_damaged_file_is_named(tmp_path, text):
  path = tmp_path / "experiment.json"
  path.write_bytes(text.encode("latin-1"))
  with pytest.raises(UserError, match=r"experiment\.json is damaged") as error:
    registry.load(path)
  assert "\n" not in str(error.value)
  with pytest.raises(UserError, match="is damaged"):
    registry.load(experiment_file(tmp_path, "Synthetic126M", {"NUM_LAYERS": 3}))


@pytest.mark.parametrize(
  ("name", "ours"),
  [
    ("GPT5B", "Pile5B"),
    ("paxml.contrib.gpu.scripts_gpu.configs.GPT5B", "Pile5B"),
    ("paxml.contrib.gpu.scripts_gpu.configs.GPT175B", "Pile175B"),
    ("paxml.tasks.lm.params.c4.C4SpmdGpt3AdamOrgHP", "C4Gpt175B"),
    ("tasks.lm.params.c4.C4SpmdGpt3AdamOrgHP", "C4Gpt175B"),
    *(
      (f"paxml.contrib.gpu.scripts_gpu.configs.{name}", name)
      for name in (
        *("Pile126M", "Pile5B", "Pile175B", "Lambada126M", "Synthetic126M", "Synthetic5B"),
        *("Synthetic175B", "LLaMA7B", "LLaMA13B", "LLaMA70B"),
      )
    ),
  ],
)
def test_names_of_pax_are_understood(name, ours, capsys):
  assert registry.find(name).__name__ == ours
  assert capsys.readouterr().err == f"paxlike: --fdl_config={name} of Pax is {ours} here\n"
