# SPDX-License-Identifier: Apache-2.0
"""Errors of the Python API name its keywords and calls, not the flags of the command."""

import pytest

import paxlike
from paxlike.api import error_messages


@pytest.mark.parametrize(
  ("message", "expected"),
  [
    ("give --fdl.DATA_PATH=PATH (a file).", "give DATA_PATH=PATH (a file)."),
    (
      "give --fdl.TOKENIZER=huggingface --fdl.VOCAB_PATH='a b/t.json'",
      "give TOKENIZER=\"huggingface\" VOCAB_PATH='a b/t.json'",
    ),
    (
      "set --fdl.DATA_PATHS={NAME: PATH}, --fdl.ICI_MESH_SHAPE=[-1,1,1].",
      "set DATA_PATHS={NAME: PATH}, ICI_MESH_SHAPE=[-1,1,1].",
    ),
    (
      "set another --job_log_dir (--fdl.CHECKPOINT_RESTORE_PATH).",
      "set another folder (CHECKPOINT_RESTORE_PATH).",
    ),
    ("by --fdl.eval_data[dev].num_batches=16.", "by eval_data[dev].num_batches=16."),
    ("trust it: --fdl_allow_modules=a,b.c", 'trust it: allow_modules=["a", "b.c"]'),
    ("--job_log_dir=/x y: no such folder.", "folder /x y: no such folder."),
    ("--to=x already exists", "folder x already exists"),
    (
      "--fdl_config: no experiment X. --list shows all of them.",
      "no experiment X. The command paxlike --list shows all of them.",
    ),
    ("Did you mean --fdl_config=mine.MyGpt?", 'Did you mean "mine.MyGpt"?'),
    ("x.py, line 1: KeyError: 'a'. --traceback shows more.", "x.py, line 1: KeyError: 'a'."),
    ("the range of --dtype=float16: give", 'the range of dtype="float16": give'),
    ("SAVE. --mode=compile shows it", "SAVE. paxlike --mode=compile shows it"),
    ("omit --base.", "omit --base of paxlike-convert."),
    ("run the same command again", "run the same call again"),
    ("no flags here: -1, a=b.", "no flags here: -1, a=b."),
  ],
)
def test_flags_become_keywords(message, expected):
  assert error_messages.translated(message) == error_messages.translated(expected) == expected


def test_errors_of_calls_have_no_flags(tmp_path, tiny, trained):
  calls = {
    "no experiment NoSuch. The command paxlike --list": lambda: paxlike.train("NoSuch", tmp_path),
    "DATA_PATH is not set: give DATA_PATH=PATH": lambda: paxlike.train(tiny, tmp_path / "run"),
    "^folder .*none: no such folder": lambda: paxlike.load(tmp_path / "none"),
    "^folder .*nowhere: no such": lambda: paxlike.Run(tmp_path / "nowhere"),
    'MAX_STEPS="x": ': lambda: paxlike.load(trained.folder, MAX_STEPS="x"),
  }
  for says, call in calls.items():
    with pytest.raises(paxlike.UserError, match=says) as error:
      call()
    assert "--fdl" not in str(error.value) and "--job_log_dir" not in str(error.value)
