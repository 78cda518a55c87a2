# SPDX-License-Identifier: Apache-2.0
"""`paxlike-data show` prints the data of any experiment, and says what is wrong in one line."""

import json
import re

import pytest

from paxlike import data_command

MODULE = """
from paxlike.experiments import datasets
from paxlike.experiments.llama import Llama2_7B


class Chat(datasets.Jsonl, Llama2_7B):
  MAX_SEQ_LEN = 64
  MAX_STEPS = 1


class Pairs(datasets.Preferences, Llama2_7B):
  MAX_SEQ_LEN = 64
  MAX_STEPS = 1
"""


@pytest.fixture
def at_home(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path / "cache"))
  (tmp_path / "shown_data.py").write_text(MODULE)
  chats = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(10, 30)]
  pairs = [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}] * 20
  for name, records in (("chats", chats), ("pairs", pairs)):
    (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))


def shown(capsys, *flags):
  assert data_command.run(["show", *flags]) == 0
  return capsys.readouterr().out


def test_data_of_every_kind_are_printed(at_home, capsys):
  chat = ("--fdl_config=shown_data.Chat", "--fdl.DATA_PATH=chats.jsonl")
  out = shown(capsys, *chat, "--num=1")
  assert re.search(r"--- segment 1: 8 tokens, 3 with loss\n(\d\d)\+1=⟦\d\d<EOS>⟧\n", out)
  assert "sequence 1 of 2: 63 of 64 positions" in out and "padding: 1.6%" in out
  assert shown(capsys, *chat, "--num=0", "--split=validation").count("sequence") == 1
  out = shown(capsys, "--fdl_config=shown_data.Pairs", "--fdl.DATA_PATH=pairs.jsonl", "--num=1")
  assert "with loss\n1+1=⟦2<EOS>⟧\n--- rejected" in out and "1+1=⟦3<EOS>⟧" in out
  out = shown(capsys, "--fdl_config=SumsRl", "--num=1", "--sample=5")
  assert re.search(r'prompt 1 of 9000: \d of 6 tokens\n\d+\+\d+=\n--- answer: "\d+"\n', out)
  assert "\n5 prompts of 9000\n" in out


def test_colours_are_for_terminals_that_want_them(at_home, capsys, monkeypatch):
  flags = ("--fdl_config=SumsRl", "--num=1", "--sample=0")
  assert "\x1b" not in shown(capsys, *flags)
  assert "\x1b" in shown(capsys, *flags, "--color=always")
  monkeypatch.setattr("sys.stdout.isatty", lambda: True)
  monkeypatch.setenv("TERM", "xterm")
  monkeypatch.delenv("NO_COLOR", raising=False)
  assert "\x1b" in shown(capsys, *flags)
  assert "\x1b" not in shown(capsys, *flags, "--color=never")
  monkeypatch.setenv("NO_COLOR", "1")
  assert "\x1b" not in shown(capsys, *flags)


@pytest.mark.parametrize(
  ("flags", "says"),
  [
    ([], "the following arguments are required: command"),
    (["show"], "Give --fdl_config=NAME"),
    (["show", "--fdl_config=SumsRl", "--split=validatoin"], "Did you mean validation?"),
    (["show", "--fdl_config=SumsRl", "--num=-1"], "argument --num: expected a number"),
    (["show", "--fdl_config=SumsRl", "--mode=train"], "--mode is for paxlike"),
    (["show", "--fdl_config=Synthetic126M", "--split=eval"], "no evaluation data"),
    (["show", "--fdl_config=shown_data.Chat", "--fdl.DATA_PATH=nowhere"], "matches no file"),
  ],
)
def test_what_cannot_be_shown_is_said_in_a_line(at_home, capsys, flags, says):
  assert data_command.run(flags) == 2
  out, error = capsys.readouterr()
  assert out.count("\n") <= 3 and error.startswith("paxlike-data: ") and says in error
  assert error.count("\n") == 1
