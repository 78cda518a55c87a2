# SPDX-License-Identifier: Apache-2.0
"""Text files: every kind gives the same tokens, and what is wrong with them is said."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from paxlike.data.packing import PackedRows
from paxlike.data.text import text_files
from paxlike.data.text.text_files import TextFiles
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from paxlike.errors import UserError

TEXTS = [
  "First document.\nTwo lines.\n",
  "naïve 漢字 \U0001f600",
  "",
  "\u2028 separators\r\n\tx",
  "z",
]


class Counting(ByteTokenizer):
  """Counts the texts that it has encoded."""

  def __init__(self):
    self.num_texts = 0

  def encode(self, text: str) -> np.ndarray:
    self.num_texts += 1
    return super().encode(text)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
  folder = tmp_path / "cache"
  monkeypatch.setenv("PAXLIKE_CACHE", str(folder))
  return folder


def make(path: pathlib.Path | str | None, tokenizer: Tokenizer | None = None, **options: Any):
  tokenizer = tokenizer or ByteTokenizer()
  options = {"vocab_size": 257} | options
  return TextFiles(path=None if path is None else str(path), tokenizer=tokenizer, **options)


def cut(corpus: TextFiles) -> PackedRows:
  return PackedRows(corpus=corpus, seq_len=4, seed=5)


def documents(corpus: TextFiles) -> list[str]:
  tokens, offsets, _ = corpus.index()
  return [ByteTokenizer().decode(part) for part in np.split(tokens, offsets[1:-1])]


def lines(texts: list[str], field: str = "text") -> bytes:
  records = [{"id": number, field: text} for number, text in enumerate(texts)]
  return "\n\n".join(json.dumps(record) for record in records).encode()


def write(
  folder: pathlib.Path, kind: str, texts: list[str], *, field: str = "text"
) -> pathlib.Path:
  """Writes documents and returns what DATA_PATH is to be."""
  if kind == "txt":
    for number, text in enumerate(texts):
      (folder / "deep").mkdir(exist_ok=True, parents=True)
      (folder / "deep" / f"{number}.txt").write_bytes(text.encode())
    return folder
  path = folder / f"data.{kind}"
  folder.mkdir(exist_ok=True)
  if kind == "jsonl":
    path.write_bytes(lines(texts, field))
  elif kind == "jsonl.zst":  # Two frames, as parallel compressors write.
    data, compress = lines(texts, field), zstandard.ZstdCompressor().compress
    path.write_bytes(compress(data[:50]) + compress(data[50:]))
  else:
    columns = {"id": list(range(len(texts))), field: texts}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=2)
  return path


KINDS = ("txt", "jsonl", "jsonl.zst", "parquet")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("together", [1, 20, 2**20])
def test_every_kind_gives_the_same_documents(tmp_path, kind, together, monkeypatch):
  monkeypatch.setattr(text_files, "_BATCH_CHARACTERS", together)
  assert documents(make(write(tmp_path / "data", kind, TEXTS))) == TEXTS


def test_every_kind_gives_the_same_rows(tmp_path):
  rows = []
  for kind in KINDS:
    dataset = cut(make(write(tmp_path / kind, kind, TEXTS)))
    rows.append(dataset.rows(2, np.arange(dataset.num_rows(2))))
    assert dataset.fingerprint() == cut(make(tmp_path / kind)).fingerprint()
  assert rows[0]["weights"].sum() > 50
  for arrays in rows[1:]:
    for name, array in arrays.items():
      np.testing.assert_array_equal(array, rows[0][name])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_field_is_chosen_and_a_missing_one_is_named(tmp_path, kind):
  path = write(tmp_path, kind, TEXTS, field="content")
  assert documents(make(path, field="content")) == TEXTS
  with pytest.raises(UserError, match=rf"{path}.*'text'.*set DATA_FIELD"):
    make(path).index()
  with pytest.raises(UserError, match=rf"{path}.*no text in (field|column) 'id': set DATA_FIELD"):
    make(path, field="id").index()


def test_parquet_text_may_be_missing_or_of_any_string_type(tmp_path):
  column = pyarrow.array(["a", None, "b"])
  for number, type_ in enumerate((pyarrow.large_string(), pyarrow.string_view())):
    path = tmp_path / f"{number}.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": column.cast(type_)}), path)
    assert documents(make(path)) == ["a", "b"]


def test_folder_and_glob_are_read_in_the_order_of_names(tmp_path):
  write(tmp_path / "data", "txt", ["0", "1"])
  write(tmp_path / "data", "jsonl", ["a", "b"])
  (tmp_path / "data" / "README.md").write_text("not text to train on")
  (tmp_path / "data" / "folder.txt").mkdir()
  assert documents(make(tmp_path / "data")) == ["a", "b", "0", "1"]
  assert documents(make(tmp_path / "data" / "**" / "*.txt")) == ["0", "1"]
  assert documents(make(tmp_path / "data" / "deep" / "1.txt")) == ["1"]


def test_character_tokenizer_is_made_of_the_files(tmp_path):
  path = write(tmp_path / "data", "jsonl", ["cab", "abé"])
  corpus = TextFiles(path=str(path), tokenizer=None, vocab_size=4)
  corpus.check()
  assert corpus.tokenizer.vocab_size == 4
  assert corpus.index().tokens.tolist() == [2, 0, 1, 0, 1, 3]


def test_text_is_tokenized_once(tmp_path, capsys):
  path = write(tmp_path, "jsonl", TEXTS)
  first, second = Counting(), Counting()
  found = [make(path, tokenizer) for tokenizer in (first, second)]
  assert documents(found[0]) == documents(found[1]) == TEXTS
  assert first.num_texts == len(TEXTS) and second.num_texts == 0
  assert capsys.readouterr().err.count("tokenizing 1 files") == 1


def test_changed_file_is_tokenized_again(tmp_path):
  path = write(tmp_path, "jsonl", ["old"])
  before = make(path)
  with cut(before).batches(1) as batches:
    state = next(batches).state
  path.write_bytes(lines(["new"]))
  os.utime(path, ns=(1, 1))
  after = make(path)
  assert documents(after) == ["new"]
  with pytest.raises(UserError, match="other training data"):
    cut(after).batches(1, state=state)


def test_added_file_is_tokenized_too(tmp_path):
  folder = write(tmp_path / "data", "txt", ["0"])
  assert documents(make(folder)) == ["0"]
  write(folder, "txt", ["0", "1"])
  assert documents(make(folder)) == ["0", "1"]


def test_making_and_checking_write_nothing(tmp_path, cache):
  make(write(tmp_path, "jsonl", TEXTS)).check()
  assert not cache.exists()


def test_a_single_file_may_have_any_name_and_those_of_a_glob_not(tmp_path):
  path = tmp_path / "NOTES.md"
  path.write_text("text")
  index = TextFiles(path=str(path), tokenizer=ByteTokenizer(), vocab_size=257).index()
  assert ByteTokenizer().decode(index.tokens) == "text"
  with pytest.raises(UserError, match=r"NOTES\.md is not one of \.txt, \.jsonl, \.jsonl\.zst"):
    TextFiles(path=str(tmp_path / "*.md"), tokenizer=ByteTokenizer(), vocab_size=257).check()


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"{path}:3 is not JSON: Expecting value"),
    ("a.jsonl", b'{"text": "a"}\n["text"]\n', r"{path}:2: not a JSON object"),
    ("a.jsonl", b'{"text": "\xff"}\n', r"{path}:1 is not UTF-8 text: invalid start byte at 10"),
    ("a.txt", b"\xff", r"{path} is not UTF-8 text: invalid start byte at 0"),
    ("a.jsonl.zst", b"junk", r"{path} cannot be read: .*ZSTD"),
    ("a.parquet", b"junk", r"{path} is not a valid parquet file"),
    ("a.parquet", b"", r"{path} is not a valid parquet file"),
    ("a.txt", b"", r"DATA_PATH={path} has no text"),
    ("a.jsonl", b"\n", r"DATA_PATH={path} has no text"),
    ("a.md", b"\xff", r"{path} is not UTF-8 text: invalid start byte at 0"),
  ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, content, message):
  path = tmp_path / name
  path.write_bytes(content)
  with pytest.raises(UserError, match=message.format(path=path)):
    make(path).index()


@pytest.mark.parametrize("kind", ["jsonl.zst", "parquet"])
def test_cut_file_is_refused(tmp_path, kind):
  path = write(tmp_path, kind, [str(number) for number in range(10_000)])
  whole = path.read_bytes()
  for size in (len(whole) // 2, len(whole) - 3):
    path.write_bytes(whole[:size])
    with pytest.raises(UserError, match=str(path)):
      make(path).index()
  path.write_bytes(whole)
  assert len(documents(make(path))) == 10_000


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
  content = "first" if name == "a.txt" else '{"text": "first"}\n'
  (tmp_path / name).write_text(content, encoding="utf-8-sig")
  assert make(tmp_path / name).index().tokens.tolist() == [*b"first"]


def test_what_is_wrong_with_the_path_is_said(tmp_path):
  (tmp_path / "empty").mkdir()
  os.mkfifo(tmp_path / "pipe")
  for path, message in [
    (None, "DATA_PATH is not set: give --fdl.DATA_PATH=PATH \\("),
    ("", "DATA_PATH is not set"),
    (tmp_path / "empty", f"DATA_PATH={tmp_path}/empty holds no file with a suffix of .txt"),
    (tmp_path / "missing", f"DATA_PATH={tmp_path}/missing matches no file"),
    (tmp_path / "pipe", f"DATA_PATH={tmp_path}/pipe is a pipe, not a regular file"),
    (tmp_path / "*.txt", f"DATA_PATH={tmp_path}/[*].txt matches no file"),
  ]:
    with pytest.raises(UserError, match=message):
      make(path).check()


def test_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
  path = write(tmp_path, "jsonl", TEXTS)
  monkeypatch.setattr(os, "access", lambda *unused: False)  # The superuser may read everything.
  with pytest.raises(UserError, match=f"DATA_PATH: {path} cannot be read"):
    make(path).check()


def test_file_that_vanishes_is_named(tmp_path):
  path = write(tmp_path, "jsonl", TEXTS)
  dataset = make(path)
  dataset.check()
  path.unlink()
  with pytest.raises(UserError, match=f"DATA_PATH: {path} cannot be read: No such file"):
    dataset.index()


def test_vocabulary_too_small_is_refused(tmp_path):
  path = write(tmp_path, "jsonl", TEXTS)
  make(path, vocab_size=257).check()
  with pytest.raises(UserError, match=r"VOCAB_SIZE=256, .* 257 ids: set --fdl\.VOCAB_SIZE=257"):
    make(path, vocab_size=256).check()


def test_check_finds_a_bad_model_file(tmp_path):
  path = write(tmp_path, "jsonl", TEXTS)
  with pytest.raises(UserError, match=f"VOCAB_PATH={tmp_path}/none.model"):
    make(path, SentencePieceTokenizer(tmp_path / "none.model")).check()


def test_text_shorter_than_a_row_is_refused(tmp_path):
  path = write(tmp_path, "jsonl", ["a"])
  corpus = TextFiles(path=str(path), tokenizer=None, vocab_size=1)
  for split, part in (((0.0, 1.0), ""), ((0.0, 1e-9), ", fraction 0 to 1e-09 (TRAIN_SHARE)")):
    dataset = PackedRows(corpus=corpus, seq_len=4, split=split)
    with pytest.raises(UserError) as error:
      dataset.batches(1)
    wanted = "has no sequence: one needs at least 2 tokens."
    assert str(error.value) == f"DATA_PATH={path}{part} {wanted}"


@pytest.fixture
def shakespeare(shared_data) -> pathlib.Path:
  path = shared_data / "tinyshakespeare.txt"
  if not path.is_file():
    pytest.skip(f"{path} is not there")
  return path


def test_shakespeare_by_characters(shakespeare):
  """The numbers are those that nanoGPT's data/shakespeare_char prints."""

  corpus = TextFiles(path=str(shakespeare), tokenizer=None, vocab_size=65)

  def part(**options: Any) -> PackedRows:
    return PackedRows(corpus=corpus, seq_len=64, packed=False, **options)

  train, validation = part(split=(0.0, 0.9)), part(split=(0.9, 1.0), shuffle=False)
  train.check()
  assert corpus.tokenizer.vocab_size == 65
  assert train.num_rows(0) == -(-(1_003_854 - 1) // 64)
  assert validation.num_rows(0) == -(-(111_540 - 1) // 64)
  text = shakespeare.read_text()
  rows = validation.rows(0, np.arange(validation.num_rows(0)))
  ids = rows["targets"][rows["weights"] > 0]
  assert corpus.tokenizer.decode(ids) == text[1_003_855:]
  shuffled = train.rows(3, np.arange(train.num_rows(3)))
  assert shuffled["weights"].sum() == 1_003_853
  counts = np.bincount(shuffled["targets"][shuffled["weights"] > 0], minlength=65)
  expected = np.bincount(corpus.tokenizer.encode(text[:1_003_854]), minlength=65)
  assert (expected - counts).min() == 0 and (expected - counts).sum() == 1
