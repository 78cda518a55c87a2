# SPDX-License-Identifier: Apache-2.0
"""Prepared rows are those that were prepared, each once an epoch, found by number."""

import json
import os
import subprocess

import numpy as np
import pytest
from helpers import warm_python
from helpers.program import TINY, curve, run
from helpers.rows import assert_described
from helpers.sources import REPOSITORY

from paxlike.data import prepared
from paxlike.data.examples import ExampleRows
from paxlike.data.mixture import Mixture
from paxlike.data.packing import PackedRows
from paxlike.data.prepared import PreparedRows
from paxlike.data.text.text_files import TextFiles
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from paxlike.data.tuning.labeled_answers import LabeledAnswers, LabeledRows
from paxlike.data.tuning.preferences import PairRows, Preferences
from paxlike.errors import UserError


@pytest.fixture
def text(tmp_path):
  path = tmp_path / "texts.jsonl"
  rows = [{"text": f"{i} bottles of {'very ' * (i % 7)}good beer"} for i in range(80)]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return TextFiles(path=str(path), tokenizer=ByteTokenizer(), vocab_size=300)


def written(folder, **splits):
  folder.mkdir()
  prepared.write(folder, splits, vocab_size=300, num_shards=3)
  return folder


def opened(folder, **options):
  defaults = {"split": "train", "seq_len": 32, "vocab_size": 300, "tokenizer": ByteTokenizer()}
  return PreparedRows(path=str(folder), **(defaults | options))


def assert_rows(found, expected, numbers):
  left, right = found.rows(0, numbers), expected.rows(0, numbers)
  assert left.keys() == right.keys()
  for name, array in left.items():
    assert array.dtype == right[name].dtype
    np.testing.assert_array_equal(array, right[name])


def test_rows_of_any_kind_come_back(text, tmp_path):
  pairs = tmp_path / "pairs.jsonl"
  pairs.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
  preferences, labeled = (
    kind(path=str(pairs), tokenizer=ByteTokenizer(), vocab_size=300)
    for kind in (Preferences, LabeledAnswers)
  )
  for number, rows in enumerate(
    (
      PackedRows(corpus=text, seq_len=32),
      PackedRows(corpus=text, seq_len=32, packed=False),
      ExampleRows(corpus=text, seq_len=32),
      PairRows(corpus=preferences, seq_len=32),
      LabeledRows(corpus=labeled, seq_len=32),
    )
  ):
    folder = written(tmp_path / str(number), train=rows)
    found = opened(folder, shuffle=False)
    found.check()
    assert_described(found)
    assert_described(rows)
    assert found.num_rows(0) == rows.num_rows(0)
    assert_rows(found, rows, np.arange(rows.num_rows(0)))


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(text, tmp_path):
  rows = PackedRows(corpus=text, seq_len=32)
  found = opened(written(tmp_path / "rows", train=rows), seed=5)
  count = rows.num_rows(0)
  epochs = [found.rows(epoch, np.arange(count))["inputs"].tolist() for epoch in (0, 1, 7)]
  wanted = sorted(rows.rows(0, np.arange(count))["inputs"].tolist())
  assert all(sorted(epoch) == wanted for epoch in epochs)
  assert epochs[0] != epochs[1] != epochs[2] != wanted
  assert found.rows(7, np.array([3]))["inputs"].tolist() == [epochs[2][3]]
  other = opened(tmp_path / "rows", seed=6)
  assert other.rows(0, np.arange(count))["inputs"].tolist() != epochs[0]
  assert other.fingerprint() != found.fingerprint()


def test_what_does_not_fit_is_said(text, tmp_path):
  folder = written(tmp_path / "rows", train=PackedRows(corpus=text, seq_len=32))
  for options, says in (
    ({"seq_len": 16}, "MAX_SEQ_LEN=16, but .* was prepared with 32"),
    ({"vocab_size": 256}, "VOCAB_SIZE=256, but .* was prepared with 300"),
    ({"tokenizer": CharacterTokenizer("ab")}, "prepared with another tokenizer"),
    ({"split": "validation"}, "has no split validation: it has train"),
  ):
    with pytest.raises(UserError, match=says):
      opened(folder, **options).check()
  with pytest.raises(UserError, match=r"was not made by scripts/prepare_data\.py"):
    opened(tmp_path).check()
  (folder / "train-00001-of-00003.array_record").unlink()
  with pytest.raises(UserError, match=r"train-00001-of-00003\.array_record is missing"):
    opened(folder).check()
  with pytest.raises(UserError, match=r"empty: .*, fraction 0 to 0 .* has no sequence"):
    written(tmp_path / "none", empty=PackedRows(corpus=text, seq_len=32, split=(0, 0)))


def prepare(*flags):
  command = [warm_python.program(), REPOSITORY / "scripts" / "prepare_data.py", *flags]
  own = os.environ | {"PYTHONPATH": str(REPOSITORY)}
  return subprocess.run(command, env=own, capture_output=True, text=True, cwd=REPOSITORY)


def test_splits_may_differ_in_what_is_known_of_their_rows(text, tmp_path):
  packed, plain = (ExampleRows(corpus=text, seq_len=32, packed=how) for how in (True, False))
  folder = written(tmp_path / "rows", train=packed, validation=plain)
  assert_rows(opened(folder, shuffle=False), packed, np.arange(3))
  assert_rows(opened(folder, shuffle=False, split="validation"), plain, np.arange(3))


def test_what_never_ends_is_not_prepared(text, tmp_path):
  mixture = Mixture(sources={"a": PackedRows(corpus=text, seq_len=32)})
  with pytest.raises(UserError, match="train is endless"):
    written(tmp_path / "rows", train=mixture)


@pytest.mark.slow
def test_the_script_reads_the_flags_of_paxlike(tmp_path):
  nothing = prepare("--list", f"--to={tmp_path}/rows")
  assert nothing.returncode == 2 and "give --fdl_config=" in nothing.stderr
  flags = ("--fdl_config=Pile126M", f"--tfds_data_dir={tmp_path}", "--fdl.VOCAB_PATH=x.model")
  missing = prepare(*flags, f"--to={tmp_path}/rows")
  assert (
    missing.returncode == 2 and f"no TFDS data set the_pile:1.0.0 in {tmp_path}" in missing.stderr
  )
  assert not (tmp_path / "rows").exists()


@pytest.mark.slow
def test_a_run_on_what_the_script_made_goes_on_from_any_step(text, tmp_path):
  flags = ["--fdl.VOCAB_SIZE=300", "--fdl.MAX_SEQ_LEN=32"]
  data = ["--fdl_config=Text126M", f"--fdl.DATA_PATH={tmp_path}/texts.jsonl"]
  folder = tmp_path / "rows"
  done = prepare(*data, *flags, f"--to={folder}", "--shards=2")
  assert done.returncode == 0, done.stderr
  assert "train" in done.stdout and "validation" in done.stdout
  again = prepare(*data, *flags, f"--to={folder}")
  assert again.returncode == 2 and "already exists" in again.stderr
  wrong = prepare(*data, "--fdl.MAX_SEQ_LENGTH=3", f"--to={tmp_path}/other")
  assert wrong.returncode == 2 and "MAX_SEQ_LEN" in wrong.stderr and "Traceback" not in wrong.stderr
  assert not (tmp_path / "other").exists()

  small = {"NUM_LAYERS": 1, "MODEL_DIMS": 16, "HIDDEN_DIMS": 32, "NUM_HEADS": 2, "DIMS_PER_HEAD": 8}
  flags += [f"--fdl.{name}={value}" for name, value in small.items()]
  flags += [flag for flag in TINY if not flag.split("=")[0].endswith(("config", "SIZE", "LEN"))]
  flags += ["--fdl_config=Prepared126M", f"--fdl.DATA_PATH={folder}", "--fdl.PERCORE_BATCH_SIZE=1"]
  flags += ["--fdl.LR_COS_DECAY_START=3", "--fdl.LR_COS_DECAY_END=100"]
  assert run(*flags, f"--job_log_dir={tmp_path}/whole", "--fdl.MAX_STEPS=30") == 0
  for steps in (11, 30):
    assert run(*flags, f"--job_log_dir={tmp_path}/parts", f"--fdl.MAX_STEPS={steps}") == 0
  assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
  assert len(curve(tmp_path / "whole", "eval")) == 1
