# SPDX-License-Identifier: Apache-2.0
"""The tasks against what their definitions say, on small data sets that TFDS wrote."""

import json

import fiddle as fdl
import numpy as np
import pytest
import sentencepiece

from paxlike import registry
from paxlike.data.seqio import corpus, tasks, tfds_writer
from paxlike.data.seqio.tfds_writer import Schema
from paxlike.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PASSAGES = [
  "“Come in,” she said,\nand he opened the  door",
  " It’s late and 'tis time to go home \n",
  "Nobody knew what ‘it’ meant but Anna",
]
TEXTS = [f"Text number {i} says {'more and ' * (i % 9)}no more." for i in range(300)]
QUESTIONS = [
  {"passage": "Cats are animals.", "question": "is a cat an animal", "label": True},
  {"passage": "Dogs bark.", "question": "do dogs meow", "label": False},
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = tmp_path_factory.mktemp("vocabulary") / "pieces.model"
  with path.open("wb") as model:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([*TEXTS, *PASSAGES, "question: answer:"] * 20),
      model_writer=model,
      vocab_size=300,
      model_type="bpe",
      byte_fallback=True,
      user_defined_symbols=["▁yes", "▁no"],
      minloglevel=2,
    )
  return str(path)


def write(root, name, splits, rows, **fields):
  files = []
  for split, part in rows.items():
    path = root / f"{split}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in part))
    files.append(path)
  schema = Schema(name=name, splits=splits, fields={k: ((k,), v) for k, v in fields.items()})
  return str(tfds_writer.write(schema, files, root / "tfds"))


def read(register, folder, vocabulary, **options):
  task = corpus.find(register(folder=folder, vocab_path=vocabulary))
  return list(corpus.documents(task, **options))


def test_lambada_asks_for_the_last_word(tmp_path, vocabulary):
  rows = {"test": [{"text": text} for text in PASSAGES]}
  folder = write(tmp_path, "my_lambada:1.0.0", ("test",), rows, text=str)
  pieces = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  wanted = [
    ('"Come in," she said,\nand he opened the', " door"),
    ("It's late and 'tis time to go", " home"),
    ("Nobody knew what 'it' meant but", " Anna"),
  ]
  found = read(
    tasks.lambada_eval, folder, vocabulary, split="test", bos_id=0,
    lengths={"inputs": 100, "targets": 64},
  )  # fmt: skip
  for document, (inputs, targets) in zip(found, wanted, strict=True):
    before, after = pieces.encode(inputs), pieces.encode(targets)
    assert document["tokens"].tolist() == [0, *before, *after]
    assert document["weights"].tolist() == [0] * (1 + len(before)) + [1] * len(after)
  cut = read(
    tasks.lambada_eval, folder, vocabulary, split="test", bos_id=0,
    lengths={"inputs": 5, "targets": 64},
  )  # fmt: skip
  assert cut[0]["tokens"].tolist()[:6] == [0, *pieces.encode(wanted[0][0])[:5]]


def test_boolq_compares_two_words(tmp_path, vocabulary):
  fields = {"passage": str, "question": str, "label": int}
  folder = write(
    tmp_path, "super_glue/boolq:1.0.2", ("train", "validation"), {"train": QUESTIONS}, **fields
  )
  pieces = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  (yes,), (no,) = pieces.encode("yes"), pieces.encode("no")
  found = read(tasks.boolq, folder, vocabulary, split="train", bos_id=1)
  wanted = {
    "Cats are animals.\nquestion: is a cat an animal?\nanswer:": (yes, no),
    "Dogs bark.\nquestion: do dogs meow?\nanswer:": (no, yes),
  }
  for document, (question, (answer, other)) in zip(found, wanted.items(), strict=True):
    tokens = [1, *pieces.encode(question), answer]
    assert document["tokens"].tolist() == tokens
    assert document["weights"].tolist() == [0] * (len(tokens) - 1) + [1]
    assert document["alternatives"].tolist() == [0] * (len(tokens) - 1) + [other]


def test_a_vocabulary_without_a_word_for_no_is_said():
  class Task:
    name, splits = "boolq", ("train",)

    def get_dataset(self, *unused, **ignored):
      return self

    def as_numpy_iterator(self):
      yield {"inputs": np.array([1]), "targets": np.array([2]), "alternatives": np.array([3, 4])}

  with pytest.raises(UserError, match="gives 1 and 2: set another VOCAB_PATH"):
    list(corpus.documents(Task(), split="train", bos_id=1))


def test_the_pile_is_cut_without_regard_to_documents(tmp_path, vocabulary):
  rows = {"train": [{"text": text} for text in TEXTS]}
  folder = write(tmp_path, "the_pile:1.0.0", ("train",), rows, text=str)
  pieces = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  wanted = []
  for first in range(0, len(TEXTS), 128):
    ids = [i for text in TEXTS[first : first + 128] for i in pieces.encode(text)]
    wanted += [[0, *ids[at : at + 31], pieces.eos_id()] for at in range(0, len(ids), 31)]
  found = read(
    tasks.the_pile_lm, folder, vocabulary, split="train", bos_id=0, lengths={"targets": 32}
  )
  assert [document["tokens"].tolist() for document in found] == wanted
  assert {len(tokens) for tokens in wanted[:50]} == {33}


def test_the_pile_streamed_is_the_pile_indexed(tmp_path, vocabulary):
  rows = {"train": [{"text": text} for text in TEXTS]}
  folder = write(tmp_path, "the_pile:1.0.0", ("train",), rows, text=str)
  knobs: dict = {"TFDS_NAME": folder, "VOCAB_PATH": vocabulary, "VOCAB_SIZE": 300}
  knobs |= {"MAX_SEQ_LEN": 32, "EVAL_SPLIT": None}
  parts = []
  for streaming in (False, True):
    experiment = registry.find("Pile126M")(**knobs, USE_STREAMING=streaming)
    dataset = fdl.build(experiment.rows("train", shuffle=False))
    dataset.check()
    with dataset.batches(8, repeat=False) as batches:
      parts.append([batch.arrays for batch in batches])
  found, expected = (
    {name: np.concatenate([arrays[name] for arrays in part]) for name in part[0]} for part in parts
  )
  assert found.keys() == expected.keys() and len(found["inputs"]) > 10
  # One goes from long to short; of filling, only the weight is alike.
  order = [np.lexsort((a["targets"] * (a["weights"] > 0)).T) for a in (found, expected)]
  for name in ("weights", "targets", "inputs"):
    left, right = (
      (array[name] * (array["weights"] > 0))[at]
      for array, at in zip((found, expected), order, strict=True)
    )
    width = max(left.shape[1], right.shape[1])
    left, right = (np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in (left, right))
    np.testing.assert_array_equal(left, right)


def test_c4_is_its_documents(tmp_path, vocabulary):
  rows = {"train": [{"text": text} for text in TEXTS[:5]], "validation": [{"text": "no more"}]}
  folder = write(tmp_path, "c4/en:3.0.1", ("train", "validation"), rows, text=str)
  pieces = sentencepiece.SentencePieceProcessor(model_file=vocabulary)
  found = read(tasks.c4, folder, vocabulary, split="train")
  assert [np.asarray(tokens).tolist() for tokens in found] == pieces.encode(TEXTS[:5])
  with pytest.raises(UserError, match="no split test: it has"):
    read(tasks.c4, folder, vocabulary, split="test")


def test_what_is_missing_is_said_before_anything_is_read(tmp_path, vocabulary, monkeypatch):
  monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))

  def check(name="the_pile:1.0.0", vocab_path=vocabulary, split="train"):
    with pytest.raises(UserError) as error:
      tasks.TfdsTask(tasks.the_pile_lm, tfds_name=name, vocab_path=vocab_path).check(split)
    return str(error.value)

  assert "scripts/download_the_pile.py" in check() and "tfds_data_dir" in check()
  assert "scripts/download_boolq.py" in check("super_glue/boolq:1.0.2")
  assert "TFDS_NAME" in check("other:1.0.0")
  write(tmp_path, "the_pile:1.0.0", ("train",), {"train": [{"text": "a"}]}, text=str)
  assert "has no split validation: it has train." in check(split="validation")
  features = tmp_path / "tfds" / "the_pile" / "1.0.0" / "features.json"
  told = json.loads(features.read_text())
  hostile = {"pythonClassName": "my_module.Feature"}
  for bad in (hostile, {"jsonFeature": {"json": json.dumps({"a": {"type": "my_module.X"}})}}):
    features.write_text(json.dumps({**told, **bad}))
    assert "features.json names the class 'my_module." in check()
    with pytest.raises(UserError, match="names the class"):
      tasks.the_pile_lm(folder=str(features.parent), vocab_path=vocabulary)
  unset = check(vocab_path=None)
  assert "VOCAB_PATH is not set: give --fdl.VOCAB_PATH=FILE (a SentencePiece model)" in unset
  assert unset.endswith("or set the environment variable VOCAB_PATH.")
  assert "VOCAB_PATH=/none: no such file" in check(vocab_path="/none")
  assert "VOCAB_PATH=/ is a folder: give the tokenizer's file." in check(vocab_path="/")
