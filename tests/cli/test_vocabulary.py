# SPDX-License-Identifier: Apache-2.0
"""A vocabulary of one's own texts, which gives back every text as it was."""

import json
import shlex

import numpy as np
import pytest
from helpers.program import TEXT, run

from paxlike.cli import vocabulary
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

ODD = [
  "",
  " ",
  "\n",
  "\t",
  "two  spaces,   three",
  "  lead and trail  ",
  "a\n\n\n  b\r\n\tc\t\td",
  "no-break\u00a0space, em\u2003space, zero\u200bwidth",
  "Å ﬁ ① ½ \u0301e e\u0301",
  "日本語 😀👩‍👧 \x00 \x07",
  "def f(x):\n    return x * 1234567890\n",
  "<s></s><unk><pad><0x41>",
  "x" * 5000,
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
  folder = tmp_path_factory.mktemp("texts")
  lines = [f"{i} green bottles,\thanging on the wall {i * 37}\n  and if\n" for i in range(200)]
  (folder / "a.txt").write_text("".join(lines))
  records = [{"text": f"one {i} more", "body": "other words"} for i in range(50)]
  (folder / "b.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
  return folder


def make(folder, *flags, to="spm.model", size=350):
  return vocabulary.run([f"--size={size}", f"--to={folder / to}", *flags])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_text_comes_back_as_it_was(texts, tmp_path, kind):
  size = 350 if kind == "bpe" else 292
  assert make(tmp_path, f"--data={texts}", f"--kind={kind}", size=size) == 0
  tokenizer = SentencePieceTokenizer(tmp_path / "spm.model")
  assert tokenizer.vocab_size == size and tokenizer.eos_id == 1
  for text in (*ODD, (texts / "a.txt").read_text()):
    assert tokenizer.decode(tokenizer.encode(text)) == text
  assert kind == "unigram" or len(tokenizer.encode("green bottles")) < 8
  digits = tokenizer.encode("12345")
  assert len(digits) == 5 and len(np.unique(digits)) == 5


def test_a_file_that_is_there_is_kept(texts, tmp_path, capsys):
  (tmp_path / "spm.model").write_text("mine")
  assert make(tmp_path, f"--data={texts}") == 2
  assert "already exists" in capsys.readouterr().err
  assert (tmp_path / "spm.model").read_text() == "mine"


def test_without_a_name_it_is_written_into_the_working_directory(
  texts, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  command = [f"--data={texts}", "--size=350"]
  assert vocabulary.run(command) == 0
  assert f"--fdl.VOCAB_PATH={tmp_path / 'vocabulary.model'} " in capsys.readouterr().out
  made = (tmp_path / "vocabulary.model").read_bytes()
  assert vocabulary.run([*command, "--kind=unigram"]) == 2
  assert "--to=vocabulary.model already exists: name a new file" in capsys.readouterr().err
  assert (tmp_path / "vocabulary.model").read_bytes() == made


@pytest.mark.parametrize(
  ("flags", "size", "says"),
  [
    (["--data=/nowhere"], 400, "--data=/nowhere matches no file"),
    (["--data={}", "--field=nothing"], 400, "set --field. It has: text, body"),
    (["--data={}"], 1_000_000, "set --size="),
    (["--data={}"], 100, "set --size="),
  ],
)
def test_what_cannot_be_made_is_said_in_a_line(texts, tmp_path, capfd, flags, size, says):
  path = texts / "b.jsonl" if "--field=nothing" in flags else texts
  flags = [flag.replace("{}", str(path)) for flag in flags]
  assert make(tmp_path, *flags, size=size) == 2
  error = capfd.readouterr().err
  assert says in error and error.count("\n") == 1
  assert not (tmp_path / "spm.model").exists()
  if "set --size" in says:
    (hint,) = [word.strip(",:.") for word in error.split() if word.startswith("--size=")][1:]
    assert vocabulary.run([hint, f"--to={tmp_path / 'spm.model'}", *flags]) == 0


def test_a_folder_in_the_place_of_the_file_is_refused(texts, tmp_path, capsys):
  assert make(tmp_path, f"--data={texts}", to="folder") == 2
  assert "ends with .model" in capsys.readouterr().err


@pytest.mark.slow
def test_the_flags_that_it_prints_train_a_model(texts, tmp_path, capsys):
  assert make(tmp_path, f"--data={texts}") == 0
  flags = shlex.split(capsys.readouterr().out.splitlines()[-1])
  base = [flag for flag in TEXT if "VOCAB_SIZE" not in flag]
  where = (f"--fdl.DATA_PATH={texts}", f"--job_log_dir={tmp_path / 'run'}", "--fdl.MAX_STEPS=1")
  assert run(*base, *where, *flags) == 0
