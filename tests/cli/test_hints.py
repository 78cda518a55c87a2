# SPDX-License-Identifier: Apache-2.0
"""What an error advises is a command that works."""

import re
import shlex
import sys

import pytest
from helpers import newcomer
from helpers.program import TINY, finish, run, start

from paxlike.config import local_experiments
from paxlike.convert.main import run as convert

EXPERIMENT = """
import pathlib
from paxlike.experiments import datasets, gpt

pathlib.Path('trace').touch()

class Base(datasets.Synthetic, gpt.Gpt126M):
  '''A base.'''

class _Hidden(Base): pass
class Other(dict): pass
class Mine(Base):
  '''Mine, in short.

  At length.'''
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  (tmp_path / "hinted.py").write_text(EXPERIMENT)
  package = tmp_path / "parts"
  package.mkdir()
  (package / "__init__.py").write_text("from .inner import Inner\n")
  (package / "inner.py").write_text(
    "from hinted import Mine\nfrom paxlike import Experiment\n"
    "class Inner(Mine): pass\nclass Plain(Experiment): pass\n"
  )
  (tmp_path / "broken.py").write_text("class (:")
  (tmp_path / "odd-name.py").write_text(EXPERIMENT)
  yield tmp_path
  sys.modules.pop("hinted", None)


def advised(error):
  """Returns the last flag of an error's advice."""
  (line,) = error.strip().splitlines()
  return shlex.split(re.findall(r"(?:Did you mean(?: the knob)?) (.+?)\??$", line)[-1])


@pytest.mark.slow
def test_experiments_of_the_folder_are_listed_and_not_imported(home, capsys):
  names = [found.name for found in local_experiments.find()]
  expected = ["hinted.Base", "hinted.Mine", "parts.inner.Inner", "parts.inner.Plain"]
  assert names == expected
  assert run("--list") == 0
  out = capsys.readouterr().out
  assert re.search(r"hinted\.Mine +Mine, in short\.\n", out)
  assert not (home / "trace").exists()


@pytest.mark.parametrize(
  "flag",
  [
    "--num_layers=1",
    "--NUM_LAYERS=1",
    "--num_layer=1",
    "--lr=1e-3",
    "--learning_rate=1e-3",
    "--batch_size=2",
    "--max_seq_length=16",
    "--seed=3",
    "--fdl.num_layers=1",
  ],
)
def test_what_is_given_as_a_flag_and_is_a_knob_is_named_as_one(flag, capsys):
  assert run(*TINY, "--mode=show", flag) == 2
  (hint,) = advised(capsys.readouterr().err)
  assert hint.startswith("--fdl.") and hint.endswith(flag.partition("=")[2])
  assert run(*TINY, "--mode=show", hint) == 0


@pytest.mark.parametrize(
  ("flag", "better"),
  [("--config=x", "--fdl_config"), ("--output_dir=x", "--job_log_dir"), ("--promt=x", "--prompt")],
)
def test_a_flag_of_other_programs_is_the_one_here(flag, better, capsys):
  assert run(flag) == 2
  assert capsys.readouterr().err.endswith(f"Did you mean {better}?\n")


def test_a_flag_like_none_has_no_false_friend(capsys):
  assert run("--frobnicate=2") == 2
  assert "Did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Mine", "hinted.Min", "Synthetc126M"])
def test_an_experiment_nearly_named_is_found(home, name, capsys):
  del home
  assert run(f"--fdl_config={name}", "--mode=show") == 2
  (hint,) = advised(capsys.readouterr().err)
  full = hint if "." in hint or hint.startswith("Synth") else f"hinted.{hint}"
  assert run(f"--fdl_config={full}", "--mode=show") == 0


@pytest.mark.slow
def test_the_knobs_of_a_run_are_listed_by_its_folder(tmp_path, capsys):
  flags = ("--mode=eval", f"--job_log_dir={tmp_path / 'run'}")
  assert run(*TINY, "--fdl.MAX_STEPS=1", flags[1]) == 0
  assert run(*flags, "--fdl.FROBNICATE=1") == 2
  assert "--fdl_help lists its knobs" in capsys.readouterr().err
  for given in (flags, flags[1:]):
    assert run(*given, "--fdl_help") == 0
    assert "--fdl.NUM_LAYERS=" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_its_experiment_is_gone_on_with_by_the_flags_named(tmp_path):
  newcomer.make(tmp_path, "mine_named")
  assert convert(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 0
  flags = ("--fdl_config=mine_named.Mine", "--job_log_dir=run")
  assert finish(start(*flags, cwd=tmp_path))[0] == 0
  for mode in ((), ("--mode=show",)):
    status, _, error = finish(start(*mode, "--job_log_dir=run", cwd=tmp_path))
    assert status == 2
    hints = [word.rstrip(".") for word in error.split() if word.startswith("--fdl_")][1:]
    assert hints[0] == "--fdl_config_file=run/config.json" and len(hints) == 2
    status, _, error = finish(start(*mode, *hints, "--job_log_dir=run", cwd=tmp_path))
    assert status == 0, error


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_a_run_whose_base_was_moved_is_evaluated(tmp_path, lora):
  newcomer.make(tmp_path, "mine_based")
  assert convert(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 0
  flags = ("--fdl_config=mine_based.MyChat", "--job_log_dir=run", f"--fdl.USE_LORA={lora}")
  assert finish(start(*flags, cwd=tmp_path))[0] == 0
  (tmp_path / "ours").rename(tmp_path / "moved")
  status, _, error = finish(start("--mode=eval", "--job_log_dir=run", cwd=tmp_path))
  assert (status == 0) is not lora, error
  if lora:
    assert "set --fdl.CHECKPOINT_RESTORE_PATH to its path" in error
    flags = ("--mode=eval", "--job_log_dir=run", "--fdl.CHECKPOINT_RESTORE_PATH=moved")
    status, _, error = finish(start(*flags, "--fdl_allow_modules=mine_based", cwd=tmp_path))
    assert status == 0, error
