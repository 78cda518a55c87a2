# SPDX-License-Identifier: Apache-2.0
"""The lengths of ids in bytes add up to those of any text, or are not given."""

import json

import numpy as np
import pytest
import tokenizers
from helpers import tiny_tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer

# SentencePiece decodes U+2581 as a space.
TEXTS = [*(text for text in tiny_tokenizers.TEXTS if "▁" not in text), " <end>x ", "ÅÄ 𓀀\0\x7f"]
LOSSLESS = {
  "normalization_rule_name": "identity",
  "add_dummy_prefix": False,
  "remove_extra_whitespaces": False,
  "byte_fallback": True,
  "vocab_size": 320,
}


def sentencepiece(folder, **options):
  path = folder / "tokenizer.model"
  tiny_tokenizers.sentencepiece(path, **(LOSSLESS | options))
  return SentencePieceTokenizer(path)


def hugging_face(folder, model):
  path = folder / "tokenizer.json"
  model.save(str(path))
  return HuggingFaceTokenizer(path)


def of_bytes(folder, *, prefix=False, normalizer=None):
  """As of GPT-2, with an added token that is special and one that is not."""
  made: object = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
  made.decoder = decoders.ByteLevel()
  if normalizer is not None:
    made.normalizer = normalizer
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
  made.train_from_iterator(tiny_tokenizers.TEXTS, trainer)
  made.add_special_tokens([tokenizers.AddedToken("<s>", special=True)])
  made.add_tokens([tokenizers.AddedToken("<énd>", special=False)])
  return hugging_face(folder, made)


def of_gemma(folder, *, prefix=False):
  """Pieces with a fallback to bytes, and an added token of two spaces, as of Gemma and LLaMA 2."""
  pieces = [f"<0x{byte:02X}>" for byte in range(256)] + [*"▁abcdehlo", "he", "ll", "é"]
  made: object = tokenizers.Tokenizer(
    models.BPE(
      vocab={piece: i for i, piece in enumerate(pieces)},
      merges=[("h", "e"), ("l", "l")],
      byte_fallback=True,
    )
  )
  replace = normalizers.Replace(" ", "▁")
  made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
  made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
  made.add_tokens([tokenizers.AddedToken("▁▁", normalized=False)])
  return hugging_face(folder, made)


EXACT = {
  "bytes": lambda folder: ByteTokenizer(),
  "characters": lambda folder: CharacterTokenizer("".join(TEXTS)),
  "sentencepiece": lambda folder: sentencepiece(folder, user_defined_symbols=["\n"]),
  "unigram": lambda folder: sentencepiece(folder, model_type="unigram"),
  "GPT-2": of_bytes,
  "Qwen": lambda folder: of_bytes(folder, normalizer=normalizers.NFC()),
  "Gemma": of_gemma,
}
CHANGING = {
  "NFKC": lambda folder: sentencepiece(folder, normalization_rule_name="nmt_nfkc"),
  "a space in front": lambda folder: sentencepiece(folder, add_dummy_prefix=True),
  "fewer spaces": lambda folder: sentencepiece(folder, remove_extra_whitespaces=True),
  "unknown": lambda folder: sentencepiece(folder, byte_fallback=False, vocab_size=64),
  "words": lambda folder: hugging_face(folder, tiny_tokenizers.words()),
  "GPT-2 with a space": lambda folder: of_bytes(folder, prefix=True),
  "accents": lambda folder: of_bytes(folder, normalizer=normalizers.NFD()),
  "lower case": lambda folder: of_bytes(folder, normalizer=normalizers.Lowercase()),
  "LLaMA 2": lambda folder: of_gemma(folder, prefix=True),
}


@pytest.mark.parametrize("make", EXACT.values(), ids=EXACT)
def test_the_lengths_of_a_lossless_tokenizer_add_up(make, tmp_path):
  tokenizer = make(tmp_path)
  lengths = tokenizer.byte_lengths()
  assert lengths.shape == (tokenizer.vocab_size,) and lengths.dtype == np.int32
  for text in TEXTS:
    assert lengths[tokenizer.encode(text)].sum() == len(text.encode()), text
  if tokenizer.eos_id is not None:
    assert lengths[tokenizer.eos_id] == 0


@pytest.mark.parametrize("make", CHANGING.values(), ids=CHANGING)
def test_a_tokenizer_that_changes_texts_has_none(make, tmp_path):
  assert make(tmp_path).byte_lengths() is None


def test_tokens_that_settings_add_stand_for_their_text_unless_they_are_special(tmp_path):
  added = {
    "320": {"content": "<a>", "special": True},
    "321": {"content": "<é>", "special": False},
  }
  settings = {"added_tokens_decoder": added, "tokenizer_class": "LlamaTokenizer", "legacy": False}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
  tokenizer = sentencepiece(tmp_path)
  lengths = tokenizer.byte_lengths()
  assert lengths is not None
  ids = tokenizer.encode("x<é>y<a>")
  assert 321 in ids and lengths[321] == 4 and lengths[320] == 0
  assert lengths[ids].sum() == len("x<é>y".encode())
