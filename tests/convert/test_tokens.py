# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and what is said of tokens, in and out; a converted folder needs no other file."""

import io
import json

import numpy as np
import pytest
import tiny_llama
import tokenizers
from program import run as paxlike

from paxlike.convert.main import run
from paxlike.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer

TEXTS = [
  "",
  "hello world",
  "  lead, two  spaces ",
  "new\nlines\n\n\ttabs",
  "Straße café ﬁ ① Å",
  "日本語",
  "emoji 😀👩‍👧",
  "▁under",
  "x" * 40,
  *(f"{a} and {b} are {a + b}, so they say" for a in range(9) for b in range(9)),
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


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


def converted(tmp_path, config=None, **files):
  """Converts a tiny model with a tokenizer of words and more files; returns its folder."""
  source = tmp_path / "theirs"
  tiny_llama.write(source, config={**tiny_llama.CONFIG, **(config or {})})
  words().save(str(source / "tokenizer.json"))
  for name, told in files.items():
    write_json(source / f"{name}.json", told)
  assert run(["--from=hf", f"--path={source}", f"--to={tmp_path / 'ours'}"]) == 0
  return tmp_path / "ours"


def test_what_is_said_of_tokens_goes_in_and_out(tmp_path):
  told = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": TEMPLATE}
  generation = {"eos_token_id": [1, 2], "bos_token_id": 0, "temperature": 0.6}
  config = {"eos_token_id": 1, "bos_token_id": 0}
  ours = converted(tmp_path, config, tokenizer_config=told, generation_config=generation)
  tokenizer = HuggingFaceTokenizer(ours / "tokenizer.json")
  assert (tokenizer.eos_id, tokenizer.end_ids, tokenizer.prefix_id) == (1, (1, 2), 0)
  assert run(["--from=paxlike", f"--path={ours}", f"--to={tmp_path / 'back'}"]) == 0
  for name, expected in {"tokenizer_config": told, "generation_config": generation}.items():
    assert json.loads((tmp_path / "back" / f"{name}.json").read_text()) == expected
  back = json.loads((tmp_path / "back" / "config.json").read_text())
  assert (back["eos_token_id"], back["bos_token_id"]) == ([1, 2], 0)


def test_ids_of_the_configuration_alone_are_kept(tmp_path):
  ours = converted(tmp_path, {"eos_token_id": [1, 2], "bos_token_id": 0})
  tokenizer = HuggingFaceTokenizer(ours / "tokenizer.json")
  assert (tokenizer.eos_id, tokenizer.end_ids, tokenizer.bos_id) == (1, (1, 2), 0)


@pytest.mark.parametrize(
  ("adds", "told", "bos", "prefix"),
  [
    (True, None, 0, 0),
    (True, {"bos_token": "<s>"}, 0, 0),
    (True, {"bos_token": "<s>", "add_bos_token": False}, None, 0),
    (False, {"bos_token": "<s>", "add_bos_token": True}, 0, 0),
    (False, {"bos_token": "<s>", "eos_token": "</s>"}, None, 0),
    (False, {"eos_token": "</s>"}, None, 1),
    (False, None, None, None),
  ],
)
def test_bos_is_as_the_tokenizer_and_its_settings_say(tmp_path, adds, told, bos, prefix):
  made = words()
  if adds:
    made.post_processor = tokenizers.processors.TemplateProcessing(  # pyright: ignore
      single="<s> $A", special_tokens=[("<s>", 0)]
    )
  made.save(str(tmp_path / "tokenizer.json"))
  if told is not None:
    write_json(tmp_path / "tokenizer_config.json", told)
  tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  assert (tokenizer.bos_id, tokenizer.prefix_id) == (bos, prefix)


def test_sentencepiece_begins_texts_unless_told_otherwise(tmp_path):
  sentencepiece(tmp_path / "tokenizer.model", vocab_size=100, hard_vocab_limit=False)
  assert SentencePieceTokenizer(tmp_path / "tokenizer.model").bos_id == 1
  write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": False})
  tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
  assert (tokenizer.bos_id, tokenizer.prefix_id) == (None, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    {"model_type": "bpe"},
    {
      "model_type": "bpe",
      "byte_fallback": True,
      "normalization_rule_name": "identity",
      "remove_extra_whitespaces": False,
    },
    {"model_type": "bpe", "user_defined_symbols": ["<x>", "he"], "add_dummy_prefix": False},
    {"model_type": "unigram", "byte_fallback": True},
    {"model_type": "unigram", "bos_id": -1},
  ],
)
def test_transformers_tokenizes_an_export_as_sentencepiece_does(tmp_path, options):
  import transformers

  ours = tmp_path / "ours"
  tiny_llama.write(tmp_path / "theirs", config={**tiny_llama.CONFIG, "vocab_size": 400})
  arrays = tiny_llama.values(
    {n: (400, *s[1:]) if s[0] == tiny_llama.VOCAB else s for n, s in tiny_llama.shapes().items()}
  )
  tiny_llama.write(tmp_path / "theirs", arrays, {**tiny_llama.CONFIG, "vocab_size": 400})
  path = tmp_path / "theirs" / "tokenizer.model"
  expected = sentencepiece(path, vocab_size=390, hard_vocab_limit=False, **options)
  assert run(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={ours}"]) == 0
  assert run(["--from=paxlike", f"--path={ours}", f"--to={tmp_path / 'back'}"]) == 0
  got = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
  bos = [] if expected.bos_id() < 0 else [expected.bos_id()]
  for text in TEXTS:
    ids = expected.encode(text)
    assert got.encode(text, add_special_tokens=False) == ids
    assert got.encode(text) == [*bos, *ids]
    if expected.unk_id() not in ids:
      assert got.decode(ids) == expected.decode(ids)
  assert got.eos_token_id == expected.eos_id()


@pytest.mark.slow
def test_a_folder_that_was_moved_evaluates_any_text_and_decodes(tmp_path, capsys):
  text = tmp_path / "README"  # No suffix of text files.
  text.write_text(" ".join(f"t{3 + i % 50}" for i in range(200)))
  ours = converted(tmp_path, {"torch_dtype": "float32"}).rename(tmp_path / "moved")
  flags = (f"--job_log_dir={ours}",)
  assert paxlike("--mode=eval", *flags, f"--fdl.DATA_PATH={text}") == 0
  said = capsys.readouterr().out
  # All of the text but the first token.
  assert "computes in float32" in said and "num_predictions: 199" in said
  assert paxlike("--mode=decode", *flags, "--prompt=t3 t4", "--max_new_tokens=2") == 0
  (result,) = (ours / "decode_out" / "decode_00000000.jsonl").read_text().splitlines()
  assert np.shape(json.loads(result)["tokens"]) == (2,)
  # What the knobs do not say is not left aside.
  graph = json.loads((ours / "config.json").read_text())
  edited = json.dumps(graph).replace('"epsilon": 1e-05', '"epsilon": 0.5', 1)
  (ours / "config.json").write_text(edited)
  capsys.readouterr()
  assert paxlike("--mode=eval", *flags, f"--fdl.DATA_PATH={text}") == 2
  assert "is not what the knobs of experiment.json make" in capsys.readouterr().err
