# SPDX-License-Identifier: Apache-2.0
"""Text survives the way to ids and back."""

import io
import json
import pathlib
import random

import numpy as np
import pytest

from paxlike.data.tokenizer import (
  ByteTokenizer,
  CharacterTokenizer,
  HuggingFaceTokenizer,
  SentencePieceTokenizer,
)
from paxlike.errors import UserError

TEXTS = ["", "a", "naïve café\n\tdef f(x):\r\n", "漢字 \U0001f600 e\u0301 \x00\x7f\u2028\ufeff"]


def random_texts(count: int, *, seed: int = 0) -> list[str]:
  """Texts of any characters, with all lengths of UTF-8, but halves of surrogate pairs."""
  generator = random.Random(seed)
  texts = []
  for _ in range(count):
    limits = generator.choices([0x80, 0x800, 0xD800, 0x110000], k=generator.randrange(50))
    points = [generator.randrange(limit) for limit in limits]
    texts.append("".join(chr(point) for point in points if not 0xD800 <= point < 0xE000))
  return texts


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> pathlib.Path:
  """A model that changes nothing: white space kept, unknown characters as bytes."""
  import sentencepiece

  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the cat sat on the mat", "def f(x):  return x"] * 20),
    model_writer=model,
    vocab_size=300,
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    add_dummy_prefix=False,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  path = tmp_path_factory.mktemp("pieces") / "pieces.model"
  path.write_bytes(model.getvalue())
  return path


@pytest.fixture(scope="module")
def pieces(model_file) -> SentencePieceTokenizer:
  return SentencePieceTokenizer(model_file)


def assert_round_trip(tokenizer, texts: list[str]):
  for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert not len(ids) or (ids.min() >= 0 and ids.max() < tokenizer.vocab_size)
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode(text), ids)
    markers = [i for i in (tokenizer.bos_id, tokenizer.eos_id) if i is not None]
    assert not set(markers) & set(ids.tolist())
    assert tokenizer.decode(np.concatenate([ids, np.array(markers, np.int32)])) == text


def test_bytes_round_trip():
  tokenizer = ByteTokenizer()
  assert_round_trip(tokenizer, TEXTS + random_texts(300))
  assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
  assert tokenizer.vocab_size == 257 and tokenizer.eos_id == 256


def test_bytes_that_are_no_text_decode_to_something():
  ids = np.arange(300)
  assert "abc" in ByteTokenizer().decode(ids)


def test_characters_round_trip():
  texts = TEXTS + random_texts(300)
  tokenizer = CharacterTokenizer("".join(texts))
  assert_round_trip(tokenizer, texts)
  assert tokenizer.vocab_size == len(set("".join(texts)))
  assert CharacterTokenizer("cab").encode("abc").tolist() == [0, 1, 2]


@pytest.mark.parametrize("text", ["abd", "Abc", "\U0001f600"])  # Amid, below and above the known.
def test_unknown_character_is_named(text):
  with pytest.raises(UserError, match=f"{max(set(text) - set('abce'), key=ord)!r} does not occur"):
    CharacterTokenizer("abce").encode(text)


def test_pieces_round_trip(pieces):
  # SentencePiece itself takes U+2581 for a space.
  texts = [text.replace("\u2581", "") for text in TEXTS + random_texts(300)]
  assert_round_trip(pieces, [*texts, "the cat  sat\n  on the\tmat "])
  assert len(pieces.encode("the cat sat")) < len("the cat sat")


def test_half_of_a_surrogate_pair_ends_no_run(pieces):
  """JSON can hold it."""
  text = "a \ud83d b"
  alphabet = CharacterTokenizer(text)
  assert alphabet.decode(alphabet.encode(text)) == text
  for tokenizer in (ByteTokenizer(), pieces):
    decoded = tokenizer.decode(tokenizer.encode(text))
    assert decoded[:2] == "a " and decoded[-2:] == " b"


def test_ids_of_a_padded_vocabulary_have_no_text(pieces):
  for tokenizer in (ByteTokenizer(), CharacterTokenizer("the cat"), pieces):
    ids = np.append(tokenizer.encode("the cat"), [tokenizer.vocab_size, 10**6])
    assert tokenizer.decode(ids) == "the cat"


def test_fingerprint_tells_tokenizers_apart(pieces, model_file, tmp_path):
  other = tmp_path / "copy.model"
  other.write_bytes(model_file.read_bytes())
  assert SentencePieceTokenizer(other).fingerprint() == pieces.fingerprint()
  tokenizers = [ByteTokenizer(), CharacterTokenizer("ab"), CharacterTokenizer("abc"), pieces]
  assert len({tokenizer.fingerprint() for tokenizer in tokenizers}) == 4
  assert CharacterTokenizer("cba").fingerprint() == CharacterTokenizer("abc").fingerprint()


@pytest.mark.parametrize(
  "content", [None, b"", b"no model at all"], ids=["missing", "empty", "junk"]
)
def test_bad_model_file_is_named(tmp_path, content):
  path = tmp_path / "vocab.model"
  if content is not None:
    path.write_bytes(content)
  tokenizer = SentencePieceTokenizer(path)  # Reads nothing yet.
  with pytest.raises(UserError, match=f"VOCAB_PATH={path}"):
    tokenizer.check(1000)


def test_cut_model_file_is_named(tmp_path, model_file):
  path = tmp_path / "cut.model"
  whole = model_file.read_bytes()
  path.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(UserError, match=f"VOCAB_PATH={path}"):
    SentencePieceTokenizer(path).check(1000)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
  """A tokenizer.json that starts texts with <s>, and a tokenizer_config.json that ends them."""
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, processors, trainers

  model = tokenizers.Tokenizer(models.BPE())
  model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  model.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=["<s>", "</s>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(["the cat sat on the mat"] * 5, trainer)
  model.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", model.token_to_id("<s>"))]
  )
  folder = tmp_path_factory.mktemp("byte_level")
  model.save(str(folder / "tokenizer.json"))
  (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
  return HuggingFaceTokenizer(folder / "tokenizer.json")


@pytest.mark.parametrize("text", ["the cat", "", "Zürich 🦊\n\ttabs"])
def test_a_tokenizer_json_gives_back_what_it_took(byte_level, text):
  ids = byte_level.encode(text)
  assert ids.dtype == np.int32
  assert byte_level.decode(ids) == text


def test_a_tokenizer_json_knows_where_texts_start_and_end(byte_level):
  assert (byte_level.bos_id, byte_level.eos_id) == (0, 1)
  assert 0 not in byte_level.encode("the cat")
  assert byte_level.vocab_size > 258
  ids = [byte_level.bos_id, *byte_level.encode("the cat"), byte_level.eos_id, 10**6]
  assert byte_level.decode(np.array(ids)) == "the cat"


@pytest.mark.parametrize("content", [None, "", "{}"], ids=["missing", "empty", "junk"])
def test_a_bad_tokenizer_json_is_named(tmp_path, content):
  path = tmp_path / "tokenizer.json"
  if content is not None:
    path.write_text(content)
  with pytest.raises(UserError, match=f"VOCAB_PATH={path}"):
    HuggingFaceTokenizer(path).check(1000)
