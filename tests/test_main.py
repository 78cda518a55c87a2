# SPDX-License-Identifier: Apache-2.0
"""The program as its users see it: what works, and what their mistakes are answered with."""

import contextlib
import json
import os
import re
import shlex
from typing import Any

import fiddle as fdl
import pytest
from helpers.program import TINY, curve, finish, run, start

from paxlike import registry, run_mode
from paxlike.config import graph_file
from paxlike.devices import chips, topology
from paxlike.errors import UserError
from paxlike.training import preflight, trainer
from paxlike.training.evaluation import EvalSet

SMALL = "--fdl_config=Synthetic126M"


def refused(capsys, folder, *flags) -> str:
  """Returns the one line that a command line with a mistake is answered with."""
  assert run(*flags, f"--job_log_dir={folder}") == 2
  out, err = capsys.readouterr()
  lines = err.strip().splitlines()
  assert out == ""
  assert len(lines) == 1, err
  assert lines[0].startswith("paxlike: ")
  assert not folder.exists()
  return lines[0]


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    ([SMALL, "--fdl.NUM_LAYER=2"], ["NUM_LAYER", "Did you mean NUM_LAYERS?"]),
    ([SMALL, "--fdl.NUM_LAYERS=four"], ["--fdl.NUM_LAYERS=four", "int"]),
    ([SMALL, "--fdl.optimizer.b3=0.9"], ["optimizer", "b3", "Did you mean"]),
    (["--fdl_config=Synthetic126MM"], ["Synthetic126MM", "Did you mean Synthetic126M?"]),
    (["--exp=Synthetic126M", "--fdl.MAX_STEP=1"], ["Did you mean MAX_STEPS?"]),
    (
      [SMALL, "--fdl.ICI_MESH_SHAPE=[3,1,1]"],
      ["ICI_MESH_SHAPE=[3, 1, 1]", "data 3", "(data, fsdp, tensor)", "8 devices are available"],
    ),
    (
      [SMALL, "--fdl.NUM_HEADS=3", "--fdl.DIMS_PER_HEAD=None", "--fdl.MODEL_DIMS=256"],
      ["MODEL_DIMS=256", "NUM_HEADS=3", "DIMS_PER_HEAD"],
    ),
    (
      [SMALL, "--fdl.LR_LRED_WARMUP=3"],
      ["LR_LRED_WARMUP has no effect with", "LR_SCHEDULE=linear_rampup_exponential_decay would"],
    ),
    ([SMALL, "--fdl.LORA_RANK=3"], ["LORA_RANK has no effect", "USE_LORA=True would give it one."]),
    (
      [SMALL, "--fdl.EARLY_STOPPING_PATIENCE=3"],
      ["has no effect with the other knobs as they are: BEST_CHECKPOINT_METRIC=... would"],
    ),
    (
      [SMALL, "--fdl.CHECKPOINT_RESTORE_STEP=3"],
      ["_STEP has no effect with", "as they are: CHECKPOINT_RESTORE_PATH=... would give it one."],
    ),
    (
      ["--fdl_config=Pile126M", "--fdl.EVAL_SPLIT=None", "--fdl.EVAL_BATCHES=3"],
      ["EVAL_BATCHES has no effect", "EVAL_SPLIT=validation would give it one."],
    ),
    ([SMALL, "--fdl.NUM_MICROBATCHES=3"], ["has no effect with the other knobs as they are."]),
    ([SMALL, "--fdl.PERCORE_BATCH_SIZE=0.3"], ["PERCORE_BATCH_SIZE=0.3 x 8 devices"]),
    ([SMALL, "--fdl.GRADIENT_ACCUMULATION_STEPS=3"], ["GRADIENT_ACCUMULATION_STEPS=3"]),
    (["--fdl_config=Text126M"], ["DATA_PATH"]),
    (["--fdl_config=Text126M", "--fdl.DATA_PATH=/nowhere/x.txt"], ["DATA_PATH=/nowhere/x.txt"]),
    ([SMALL, "--fiddler=precisoin()"], ["precisoin", "Did you mean precision"]),
    ([SMALL, "--fiddler=precision(dtyp='float32')"], ["precision", "dtype"]),
    ([SMALL, "--fiddler=remat(policy='SAVE_NOTHIN')"], ["Did you mean SAVE_NOTHING"]),
    (["--fdl_config=no_such_module.Gpt"], ["no_such_module"]),
    (["--fdl_config=json.JSONDecoder"], ["json.JSONDecoder", "Experiment"]),
    (["--fdl_config_file=/nowhere/config.json"], ["/nowhere/config.json"]),
    ([SMALL, "--mod=show"], ["--mod", "Did you mean --mode"]),
  ],
)
def test_a_mistake_is_answered_in_one_line(capsys, tmp_path, flags, says):
  line = refused(capsys, tmp_path / "run", *flags)
  for words in says:
    assert words in line


def test_an_unwritable_folder_is_named(capsys, tmp_path):
  (tmp_path / "file").write_text("")
  line = refused(capsys, tmp_path / "file" / "run", *TINY)
  assert f"--job_log_dir={tmp_path / 'file' / 'run'}" in line


def test_evaluation_without_a_run_or_checkpoint_says_so(capsys, tmp_path):
  refused(capsys, tmp_path / "none", *TINY, "--mode=eval")
  path = tmp_path / "text.txt"
  path.write_text("some words " * 2000)
  flags = ("--fdl_config=ShakespeareChar", f"--fdl.DATA_PATH={path}", f"--job_log_dir={tmp_path}")
  assert run(*flags, "--mode=eval", "--fdl.PERCORE_BATCH_SIZE=1") == 2
  assert "no checkpoint" in capsys.readouterr().err


def test_show_says_what_there_is_and_who_set_it(capsys):
  assert run(SMALL, "--mode=show", "--fdl.NUM_LAYERS=3", "--fdl.optimizer.b2=0.5") == 0
  out = capsys.readouterr().out
  rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
  assert rows["NUM_LAYERS"][1] == "3"
  assert rows["NUM_LAYERS"][2:5] == ["12", "command", "line"]
  assert rows["MODEL_DIMS"][2:5] == ["768", "subclass", "Gpt126M"]
  assert rows["VOCAB_SIZE"][2:5] == ["50304", "subclass", "Gpt"]
  assert rows["optimizer.b2"][2] == "0.5"
  assert rows["model.vocab_size"][2] == "50304"
  for words in ("parameters", "FLOPs per", "global batch", "mesh", "memory of optimizer state"):
    assert words in out


def test_against_prints_the_difference(capsys):
  assert run("--fdl_config=Synthetic5B", "--mode=show", "--against=Synthetic126M") == 0
  out = capsys.readouterr().out
  assert "stack.repeats = 24" in out
  assert "12" in out
  assert run(SMALL, "--mode=show", "--against=Synthetic126M") == 0
  assert "No difference" in capsys.readouterr().out


def test_changed_prints_what_differs_from_the_family(capsys):
  flags = ("--fdl_config=SyntheticLLaMA7B", "--mode=show", "--changed")
  assert run(*flags) == 0
  line = "No knob of SyntheticLLaMA7B differs from the default of its family.\n"
  assert capsys.readouterr().out == line
  assert run(*flags, "--fdl.NUM_LAYERS=3", "--fdl.INIT_STD=0.02", "--fdl.optimizer.b2=0.5") == 0
  out = capsys.readouterr().out
  assert re.findall(r"^  ([A-Z_]+) ", out, re.MULTILINE) == ["NUM_LAYERS"]
  assert out.endswith("\n\ngraph.optimizer.b2 = 0.5  # was 0.99\n")


def test_jax_may_take_most_of_a_gpu(monkeypatch):
  for name in chips.SHARE_NAMES:
    monkeypatch.setenv(name, "")
  # What is there when devices are first asked for; JAX reads it then.
  devices, seen = topology.devices, []
  monkeypatch.setattr(
    topology,
    "devices",
    lambda: seen.append(os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"]) or devices(),
  )
  run_mode.build_trainer(registry.find("Synthetic126M")().trainer())
  assert set(map(float, seen)) == {chips.gpu_share()} and chips.gpu_share() > 0.9


def test_devices_that_are_named_have_the_memory_of_theirs(monkeypatch):
  for name in chips.SHARE_NAMES:
    monkeypatch.setenv(name, "")
  with topology.target("h200-8"):
    topology.take_gpu_memory(15)
  assert not any(os.environ[name] for name in chips.SHARE_NAMES)


def test_either_the_graph_or_a_flag_keeps_checkpoints_from_being_written(tmp_path, monkeypatch):
  seen = []
  monkeypatch.setattr(trainer.Trainer, "trace", lambda self: None)
  monkeypatch.setattr(trainer.Trainer, "train", lambda self, *a, **k: seen.append(self.saving))
  flags = (*TINY, "--fdl.MAX_STEPS=1", f"--job_log_dir={tmp_path / 'run'}")
  for more in ((), ("--fdl.saving=false",), ("--enable_checkpoint_saving=false",)):
    assert run(*flags, *more) == 0
  assert seen == [True, False, False]


def test_fdl_help(capsys):
  assert run(SMALL, "--fdl_help") == 0
  out = capsys.readouterr().out
  assert "--fdl.NUM_LAYERS=12" in out
  assert "Number of transformer blocks." in out


@pytest.mark.slow
def test_a_run_leaves_what_it_promises_and_its_config_runs_again(capsys, tmp_path):
  first, again = tmp_path / "first", tmp_path / "again"
  assert run(*TINY, "--fdl.MAX_STEPS=3", f"--job_log_dir={first}") == 0
  out = capsys.readouterr().out
  assert len(out.splitlines()) < 60
  assert sum(line.startswith("completed step: ") for line in out.splitlines()) == 3
  assert (first / "checkpoints" / "checkpoint_00000003").is_dir()
  assert list((first / "summaries" / "train").iterdir())
  assert "num_steps = 3" in (first / "config.txt").read_text()
  assert json.loads((first / "status.json").read_text())["state"] == "finished"
  assert run(f"--fdl_config_file={first / 'config.json'}", f"--job_log_dir={again}") == 0
  assert curve(again) == curve(first)
  assert graph_file.read(again / "config.json") == graph_file.read(first / "config.json")


def test_a_config_file_from_elsewhere_runs_no_code(capsys, tmp_path):
  assert run(*TINY, "--fdl.MAX_STEPS=0", f"--job_log_dir={tmp_path / 'good'}") == 0
  text = (tmp_path / "good" / "config.json").read_text()
  bad = tmp_path / "bad.json"
  bad.write_text(text.replace("paxlike.layers:LayerNorm", "os:system"))
  assert bad.read_text() != text
  capsys.readouterr()
  line = refused(capsys, tmp_path / "run", f"--fdl_config_file={bad}")
  assert "os.system" in line and "--fdl_allow_modules" not in line
  bad.write_text(text.replace("paxlike.layers:LayerNorm", "elsewhere:system"))
  line = refused(capsys, tmp_path / "run", f"--fdl_config_file={bad}")
  assert "elsewhere.system" in line and "--fdl_allow_modules=elsewhere" in line


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_config_file_runs_no_command_and_writes_no_file(capsys, tmp_path, where):
  """By what it names as callables, and what these would be called with."""
  trace, folder = tmp_path / "trace", tmp_path / "theirs"
  folder.mkdir()
  request = {"function": "os:system", "arguments": {"command": f"touch {trace}"}, "vocab_size": 1}
  path = {"config": "paxlike.file_io:absolute", "arguments": {"path": str(trace)}}
  for name, arguments in {
    "paxlike.data.seqio.corpus:main": {"argv": {"list": ["x", json.dumps(request), "/tmp"]}},
    "paxlike.file_io:write": {"path": path, "text": "x"},
  }.items():
    graph = {"config": name, "arguments": arguments}
    (folder / "config.json").write_text(json.dumps({"paxlike_graph": 1, "graph": graph}))
    flags = {
      "file": (f"--fdl_config_file={folder / 'config.json'}", "--mode=show"),
      "folder": (f"--job_log_dir={folder}", "--mode=eval"),
    }
    assert run(*flags[where]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name.replace(":", ".") in line or "absolute" in line
    assert not trace.exists()


NAMES = {
  "validation": True, "c4_en-3.0.1": True, "Прозa": True, "...": True, ".": False, "..": False,
  "": False, "../../pwned/x": False, "a/b": False, "a\\b": False, "a b": True, "a\n": False,
  "\ud800": False, "x" * 201: False, "/tmp": False, "train[:1%]+b, 'c' (d)": True, " a": False,
  "a\0b": False, "a\x7fb": False, "x" * 200: True, "я" * 101: False, "a\u00a0": False, 3: False,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_names_of_eval_sets_are_names_of_folders_in_that_of_the_run(
  capsys, tmp_path, monkeypatch, name
):
  monkeypatch.setattr(trainer.Trainer, "trace", lambda self: None)
  monkeypatch.setattr(trainer.Trainer, "train", lambda self, *a, **k: 0)
  saved = json.loads(graph_file.dump(registry.find("Gpt3_52k")(MAX_STEPS=1).trainer()))
  arguments = saved["graph"]["arguments"]
  eval_set = {"dataset": arguments["train_data"], "num_batches": 1}
  eval_set = {"config": "paxlike.training:EvalSet", "arguments": eval_set}
  arguments["eval_data"] = {"dict": [[name, eval_set]]}
  file, folder = tmp_path / "config.json", tmp_path / "a" / "run"
  file.write_text(json.dumps(saved))
  for mode in ("train", "eval"):
    status = run(f"--fdl_config_file={file}", f"--job_log_dir={folder}", f"--mode={mode}")
    if not NAMES[name]:
      (line,) = capsys.readouterr().err.splitlines()
      assert status == 2 and line.startswith("paxlike: eval_data has a set named ")
      assert not folder.parent.exists()
    elif mode == "train":
      assert status == 0


@pytest.mark.parametrize("name", ["validation", "train[:1%]", "a b, c", "7", 'say "a"', "a=b"])
def test_the_flag_that_an_endless_eval_set_asks_for_is_one(capsys, tmp_path, monkeypatch, name):
  graph: Any = registry.find("Gpt3_52k")(MAX_STEPS=1, PERCORE_BATCH_SIZE=1).trainer()
  graph.eval_data = {name: fdl.Config(EvalSet, dataset=graph.train_data)}
  (tmp_path / "config.json").write_text(graph_file.dump(graph))
  flags = [f"--fdl_config_file={tmp_path / 'config.json'}", f"--job_log_dir={tmp_path / 'run'}"]
  monkeypatch.setattr(trainer.Trainer, "trace", lambda self: None)
  monkeypatch.setattr(trainer.Trainer, "train", lambda self, *a, **k: 0)
  line = refused(capsys, tmp_path / "run", *flags[:1])
  hint = shlex.split(re.search(r"as by (.*)\.$", line)[1])  # pyright: ignore[reportOptionalSubscript]
  assert len(hint) == 1 and run(*flags, *hint) == 0


def test_names_of_registered_eval_sets_are_such():
  for cls in registry.registered().values():
    with contextlib.suppress(UserError):  # Those that need a path, of which others have the data.
      for name in cls().eval_data():
        preflight.check_name(name)


def test_an_initialiser_that_cannot_be_called_so_is_found_before_anything_is_written(
  capsys, tmp_path
):
  saved = json.loads(graph_file.dump(registry.find("Gpt3_52k")(MAX_STEPS=1).trainer()))
  embedding = saved["graph"]["arguments"]["model"]["arguments"]["embedding"]
  embedding["arguments"]["init"] = {"symbol": "paxlike.layers:swiglu"}
  bad = tmp_path / "config.json"
  bad.write_text(json.dumps(saved))
  assert run(f"--fdl_config_file={bad}", f"--job_log_dir={tmp_path / 'run'}") in (1, 2)
  (line,) = capsys.readouterr().err.splitlines()
  assert "swiglu() takes 2" in line and not (tmp_path / "run").exists()


def test_the_gpu_names_of_pax_work(capsys):
  assert run("--fdl_config=paxlike.scripts_gpu.configs.Synthetic126M", "--mode=show") == 0
  assert "125,262,336" in capsys.readouterr().out


@pytest.mark.slow
def test_an_experiment_of_the_user_runs(tmp_path):
  (tmp_path / "my_experiments.py").write_text(
    "import fiddle as fdl\n"
    "from paxlike import layers\n"
    "from paxlike.experiments import datasets\n"
    "from paxlike.experiments.gpt import Gpt126M\n"
    "class MyGpt(datasets.Synthetic, Gpt126M):\n"
    "  VOCAB_SIZE = 64\n"
    "  MAX_SEQ_LEN = 16\n"
    "  NUM_LAYERS = 2\n"
    "  MODEL_DIMS = 32\n"
    "  HIDDEN_DIMS = None\n"
    "  NUM_HEADS = 2\n"
    "  DIMS_PER_HEAD = None\n"
    "  MAX_STEPS = 2\n"
    "  def norm(self):\n"
    "    return fdl.Partial(layers.RmsNorm)\n"
  )
  folder = tmp_path / "run"
  flags = ("--fdl_config=my_experiments.MyGpt", f"--job_log_dir={folder}")
  status, out, err = finish(start(*flags, cwd=tmp_path))
  assert status == 0, err
  assert "completed step: 1, " in out
  assert "RmsNorm" in (folder / "config.txt").read_text()
  assert os.listdir(folder / "checkpoints") == ["checkpoint_00000002"]


@pytest.mark.slow
def test_one_device_is_counted_as_one(tmp_path):
  process = start(SMALL, "--fdl.ICI_MESH_SHAPE=[3,1,1]", f"--job_log_dir={tmp_path / 'run'}")
  status, out, err = finish(process)
  assert (status, out) == (2, "")
  assert err.count("\n") == 1
  assert "3 devices, but 1 device is available" in err
  assert not (tmp_path / "run").exists()
