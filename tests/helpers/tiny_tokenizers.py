# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers, and a model for them."""

import io
import json

import tokenizers

from helpers import tiny_llama

TEXTS = [
  "",
  "hello world",
  "  lead, two  spaces ",
  "new\nlines\n\n\ttabs",
  "Straße café ﬁ ① Å",
  "日本語",
  "emoji 😀👩‍👧",
  "▁under",
  "\r\n",
  "<0x0A>",
  "a <0x41>b <0x4 0x41>",
  "x" * 40,
  *(f"{a} and {b} are {a + b}, so they say" for a in range(9) for b in range(9)),
]


def words(size=60):
  vocabulary = {"<s>": 0, "</s>": 1, "<end>": 2} | {f"t{index}": index for index in range(3, size)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="</s>"))
  made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore
  return made


def sentencepiece(path, **options):
  import sentencepiece as library

  model = io.BytesIO()
  library.SentencePieceTrainer.train(
    sentence_iterator=iter(TEXTS * 4), model_writer=model, minloglevel=2, **options
  )
  path.write_bytes(model.getvalue())
  return library.SentencePieceProcessor(model_file=str(path))


def write_json(path, told):
  path.write_text(json.dumps(told))


def large(folder, **config):
  """Writes a tiny model of 400 ids."""
  sizes = {
    n: (400, *s[1:]) if s[0] == tiny_llama.VOCAB else s for n, s in tiny_llama.shapes().items()
  }
  config = {**tiny_llama.CONFIG, "vocab_size": 400, **config}
  tiny_llama.write(folder, tiny_llama.values(sizes), config)
