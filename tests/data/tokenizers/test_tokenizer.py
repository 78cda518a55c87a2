# SPDX-License-Identifier: Apache-2.0
"""Text survives the way to ids and back."""

import io
import json
import pathlib
import random

import numpy as np
import pytest

from paxlike.data.chat import templates
from paxlike.data.tokenizers import sentencepiece_model
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
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
  with pytest.raises(UserError, match=f"{max(set(text) - set('abce'), key=ord)!r} is not in the"):
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


@pytest.mark.parametrize("path", [".", "..", "/", "/tmp/"])
def test_a_folder_in_the_place_of_the_file_is_named(path):
  for read in (
    lambda: SentencePieceTokenizer(path).check(100),
    lambda: HuggingFaceTokenizer(path).check(100),
    lambda: templates.template("tokenizer", vocab_path=path),
  ):
    with pytest.raises(UserError, match=rf"VOCAB_PATH={path[:4]}/? is a folder: give the token"):
      read()


def test_truncation_and_padding_of_its_maker_are_not_applied(byte_level, tmp_path):
  import tokenizers

  model = tokenizers.Tokenizer.from_str(byte_level._model.to_str())
  model.enable_truncation(2)
  model.enable_padding(pad_id=0, length=9)
  model.save(str(tmp_path / "tokenizer.json"))
  got = HuggingFaceTokenizer(tmp_path / "tokenizer.json").encode_all(["the cat sat", "the"])
  expected = byte_level.encode_all(["the cat sat", "the"])
  assert [ids.tolist() for ids in got] == [ids.tolist() for ids in expected]


@pytest.mark.parametrize(
  ("template", "bos"),
  [("$A </s>", None), ("<s> $A </s>", 0), ("</s> $A", 1), ("$A", None)],
)
def test_what_a_template_puts_behind_a_text_is_no_bos(byte_level, tmp_path, template, bos):
  import tokenizers

  model = tokenizers.Tokenizer.from_str(byte_level._model.to_str())
  model.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore
    single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
  )
  model.save(str(tmp_path / "tokenizer.json"))
  assert HuggingFaceTokenizer(tmp_path / "tokenizer.json").bos_id == bos


@pytest.mark.parametrize(
  ("generation", "said"),
  [
    ({"eos_token_id": 300}, "eos_token_id is 300, but the model's ids are 0 to 299"),
    ({"eos_token_id": [1, 10**30]}, "but the model's ids are 0 to 299"),
    ({"bos_token_id": -5}, "bos_token_id is -5, which is not a"),
    ({"eos_token_id": "2"}, "eos_token_id is '2', which is not a"),
    ({"pad_token_id": 301}, "pad_token_id is 301"),
  ],
)
def test_an_id_that_the_model_lacks_is_named(byte_level, tmp_path, generation, said):
  (tmp_path / "tokenizer.json").write_text(byte_level._model.to_str())
  (tmp_path / "generation_config.json").write_text(json.dumps(generation))
  with pytest.raises(UserError, match=f"^{tmp_path}/generation_config.json: .*{said}"):
    HuggingFaceTokenizer(tmp_path / "tokenizer.json").check(300)


def test_switches_are_no_tokens(byte_level, tmp_path):
  (tmp_path / "tokenizer.json").write_text(byte_level._model.to_str())
  config = {"bos_token": "<s>", "add_bos_token": "false", "add_eos_token": 0, "some_token": 1}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  assert (tokenizer.vocab_size, tokenizer.bos_id) == (byte_level.vocab_size, 0)


def test_minus_one_is_no_id(byte_level, tmp_path):
  (tmp_path / "tokenizer.json").write_text(byte_level._model.to_str())
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1, "pad_token_id": null}')
  tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  tokenizer.check(300)
  assert (tokenizer.eos_id, tokenizer.end_ids) == (None, ())


@pytest.mark.parametrize("legacy", [False, True])
def test_settings_add_tokens_to_pieces(model_file, tmp_path, legacy, monkeypatch):
  path = tmp_path / "tokenizer.model"
  path.write_bytes(model_file.read_bytes())
  plain = SentencePieceTokenizer(path)
  size = plain.vocab_size
  (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im|>": size + 1, "<x>": size}))
  (tmp_path / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": "<|im|>", "bos_token": "<s>", "legacy": legacy})
  )
  tokenizer = SentencePieceTokenizer(path)
  assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == (size + 2, size + 1, 1)
  text = "<s>the cat<|im|> sat<x>on"
  expected = [[1], plain.encode("the cat"), [size + 1], plain.encode(" sat"), [size]]
  expected = np.concatenate([*expected, plain.encode("on")])
  np.testing.assert_array_equal(tokenizer.encode(text), expected)
  assert tokenizer.decode(expected) == "the cat sat<x>on"
  texts = [text, "", "<x>", "on<x>", "the cat", text + " the cat sat on<x> the mat the cat"] * 9
  expected = [[tokens.encode(each).tolist() for each in texts] for tokens in (plain, tokenizer)]
  monkeypatch.setattr(sentencepiece_model, "_CHARACTERS_PER_THREAD", 1)  # A thread for each core.
  monkeypatch.setattr(sentencepiece_model, "_CHARACTERS_PER_PART", 1)
  for tokens, of_texts in zip((plain, tokenizer), expected, strict=True):
    assert [ids.tolist() for ids in tokens.encode_all(texts)] == of_texts
  assert tokenizer.fingerprint() != plain.fingerprint()


@pytest.mark.parametrize(
  ("options", "has_words"),
  [
    ({}, True),
    ({"normalization_rule_name": "identity", "remove_extra_whitespaces": False}, True),
    ({"add_dummy_prefix": False, "remove_extra_whitespaces": False}, True),
    ({"add_dummy_prefix": False}, False),
    ({"split_by_whitespace": False}, False),
    ({"treat_whitespace_as_suffix": True}, False),
    ({"model_type": "unigram"}, False),
    ({"byte_fallback": True, "vocab_size": 320, "user_defined_symbols": ["> <", "on"]}, True),
    ({"user_defined_symbols": ["t s"]}, False),
    ({"character_coverage": 0.98}, True),
    ({"allow_whitespace_only_pieces": True, "remove_extra_whitespaces": False}, True),
    ({"normalization_rule_tsv": "74 20\t51\n"}, False),
  ],
)
def test_long_texts_are_encoded_by_words_as_if_whole(tmp_path, monkeypatch, options, has_words):
  import sentencepiece

  model, generator = io.BytesIO(), random.Random(0)
  words = [*"ab é\n\t\u0301漢", "cat", "the", "sat", "on", "mat", "x1", "  "]
  texts = ["".join(generator.choice(words) + " " * generator.randrange(3) for _ in range(400))]
  texts += [" ".join(generator.choices(words, k=count)) for count in (*range(40), 300)]
  texts += ["the cat" + " " * 50, " " * 50, "a> <b cat > < the t sat \0 Unknown \u2581 the"]
  if rules := options.get("normalization_rule_tsv"):
    (tmp_path / "rules.tsv").write_text(rules)
    options = options | {"normalization_rule_tsv": str(tmp_path / "rules.tsv")}
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts),
    model_writer=model,
    **{"vocab_size": 60, "model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2}
    | options,
  )
  (tmp_path / "pieces.model").write_bytes(model.getvalue())
  tokenizer = SentencePieceTokenizer(tmp_path / "pieces.model")
  whole = tokenizer._model.model.encode(texts)
  for size in (2**10, 5, 1):
    monkeypatch.setattr(sentencepiece_model, "_CHARACTERS_PER_PART", size)
    assert [ids.tolist() for ids in tokenizer.encode_all(texts)] == whole
  assert (len(list(tokenizer._model._parts(texts[0]))) > 1) == has_words


@pytest.mark.parametrize(
  ("settings", "said"),
  [
    ({"added_tokens_decoder": {"9999": {"content": "<x>"}}}, "'<x>' as 9999, but its id is"),
    ({"added_tokens_decoder": {"-1": {"content": "<x>"}}}, "'-1', which is not a token id"),
    ({"added_tokens_decoder": []}, "added_tokens_decoder is not a mapping"),
    ({"extra_special_tokens": 5}, "extra_special_tokens is not a list"),
    ({"additional_special_tokens": [5]}, "is not a string"),
    ({"eos_token": 5}, "eos_token is not a string"),
  ],
)
def test_a_token_that_cannot_be_added_is_named(byte_level, model_file, tmp_path, settings, said):
  (tmp_path / "tokenizer.json").write_text(byte_level._model.to_str())
  (tmp_path / "tokenizer.model").write_bytes(model_file.read_bytes())
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  for tokenizer in (
    HuggingFaceTokenizer(tmp_path / "tokenizer.json"),
    SentencePieceTokenizer(tmp_path / "tokenizer.model"),
  ):
    with pytest.raises(UserError, match=said):
      tokenizer.check(10**5)
