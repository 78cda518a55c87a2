# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and what is said of tokens, in and out; a converted folder needs no other file."""

import json

import numpy as np
import pytest
import tokenizers
from helpers import tiny_llama
from helpers.program import run as paxlike
from helpers.tiny_tokenizers import large, sentencepiece, words, write_json

from paxlike.convert import sentencepiece_json, tokenizer_files
from paxlike.convert.main import run
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


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


@pytest.mark.slow
def test_ids_that_are_absent_are_those_of_transformers():
  import transformers

  for kind in tokenizer_files.DEFAULT_IDS:
    config = transformers.AutoConfig.for_model(kind)
    expected = {name: getattr(config, name) for name in tokenizer_files.IDS}
    got = tokenizer_files.ids({}, model_type=kind, vocab_size=10**6)
    assert got == {name: number for name, number in expected.items() if number is not None}
    assert tokenizer_files.ids(dict.fromkeys(expected), model_type=kind, vocab_size=10**6) == {}
    assert tokenizer_files.ids({}, model_type=kind, vocab_size=0) == {}


@pytest.mark.parametrize("number", [60, 10**30, -5, "2"])
def test_an_id_that_the_model_lacks_is_refused(tmp_path, capsys, number):
  for name in ("config", "generation_config"):
    source = tmp_path / name
    tiny_llama.write(source)
    words().save(str(source / "tokenizer.json"))
    write_json(source / f"{name}.json", {**tiny_llama.CONFIG, "eos_token_id": number})
    config = json.loads((source / "config.json").read_text())
    write_json(source / "config.json", {**config, "vocab_size": tiny_llama.VOCAB})
    number = tiny_llama.VOCAB if number == 60 else number
    write_json(source / f"{name}.json", {**tiny_llama.CONFIG, "eos_token_id": number})
    assert run(["--from=hf", f"--path={source}", f"--to={tmp_path / 'ours'}"]) == 2
    assert f"{name}.json: eos_token_id" in capsys.readouterr().err
  assert not (tmp_path / "ours").exists()


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
    (True, {"add_bos_token": True}, 0, 0),
    (False, {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}, 0, 0),
    (True, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}, 0, 0),
    (False, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, None, 0),
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


@pytest.mark.parametrize("told", [{}, {"bos_token": None, "tokenizer_class": "LlamaTokenizer"}])
def test_a_bos_that_is_asked_for_and_not_named_is_refused(tmp_path, capsys, told):
  source = tmp_path / "theirs"
  tiny_llama.write(source)
  words().save(str(source / "tokenizer.json"))
  write_json(source / "tokenizer_config.json", {"add_bos_token": True, **told})
  assert run(["--from=hf", f"--path={source}", f"--to={tmp_path / 'ours'}"]) == 2
  error = capsys.readouterr().err
  assert "tokenizer_config.json: add_bos_token is true, but there is no bos_token" in error
  assert error.count("\n") == 1 and not (tmp_path / "ours").exists()


def test_sentencepiece_begins_texts_unless_told_otherwise(tmp_path):
  sentencepiece(tmp_path / "tokenizer.model", vocab_size=100, hard_vocab_limit=False)
  assert SentencePieceTokenizer(tmp_path / "tokenizer.model").bos_id == 1
  write_json(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "add_bos_token": False})
  tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
  assert (tokenizer.bos_id, tokenizer.prefix_id) == (None, 1)


IM = {"<|im_start|>": 60, "<|im_end|>": 61}
FLAGS = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
DECODER = {str(i): {"content": text, "special": True, **FLAGS} for text, i in IM.items()}
TALK = "t3 t4 <|im_start|>t5 t6<|im_end|> t7 </s>"


@pytest.mark.slow
@pytest.mark.parametrize(
  "settings",
  [
    {"config": {"added_tokens_decoder": DECODER, "eos_token": "<|im_end|>"}},
    {"added": IM},
    {"added": IM, "special": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<s>"]}},
    {"config": {"additional_special_tokens": list(IM)}},
    {"config": {"extra_special_tokens": {"image_token": "<|im_start|>"}}},
    {"config": {"eos_token": "<|im_end|>", "image_token": "<|im_start|>"}},
    {"special": {"eos_token": "<|im_end|>"}},
    {"config": {"eos_token": "</s>", "split_special_tokens": True}},
    {"config": {"eos_token": "</s>", "bos_token": "<s>"}},
  ],
)
def test_tokens_of_the_settings_are_added_as_by_transformers(tmp_path, settings):
  import transformers

  words().save(str(tmp_path / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", **settings.get("config", {})}
  write_json(tmp_path / "tokenizer_config.json", config)
  for name, key in (("added_tokens", "added"), ("special_tokens_map", "special")):
    if key in settings:
      write_json(tmp_path / f"{name}.json", settings[key])
  ours = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert ours.encode(TALK).tolist() == theirs.encode(TALK, add_special_tokens=False)
  assert (ours.vocab_size, ours.eos_id) == (len(theirs), theirs.eos_token_id)


@pytest.mark.slow
@pytest.mark.parametrize(
  "settings",
  [
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
    {"tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": True},
    {"tokenizer_class": "LlamaTokenizer"},  # Which transformers passes over.
  ],
)
def test_a_class_changes_texts_as_in_transformers(tmp_path, settings):
  import transformers

  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()  # pyright: ignore
  made = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
  made.save(str(tmp_path / "tokenizer.json"))
  write_json(tmp_path / "tokenizer_config.json", settings)
  ours = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for text in ("e\u0301 a  b", "", "1 2\n"):
    assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
  assert (ours.vocab_size, ours.eos_id) == (len(theirs), theirs.eos_token_id)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_chat_model_has_the_tokenizer_of_transformers_in_and_out(tmp_path, both, legacy):
  import transformers

  theirs = tmp_path / "theirs"
  large(theirs)
  options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 390}
  options |= {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
  model = sentencepiece(theirs / "tokenizer.model", hard_vocab_limit=False, **options)
  size = model.vocab_size()
  write_json(theirs / "added_tokens.json", {text: size + i for i, text in enumerate(IM)})
  config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "legacy": legacy}
  write_json(theirs / "tokenizer_config.json", {**config, "tokenizer_class": "LlamaTokenizer"})
  if both:
    # The older file lacks the added tokens; it is not read.
    sentencepiece_json.write(theirs / "tokenizer.model", max_len=32)
    (theirs / "tokenizer.model").write_bytes(b"tiktoken")
  ours, back = tmp_path / "ours", tmp_path / "back"
  assert run(["--from=hf", f"--path={theirs}", f"--to={ours}"]) == 0
  assert run(["--from=paxlike", f"--path={ours}", f"--to={back}"]) == 0
  tokenizer = (
    HuggingFaceTokenizer(ours / "tokenizer.json")
    if both
    else SentencePieceTokenizer(ours / "tokenizer.model")
  )
  assert (tokenizer.bos_id, tokenizer.eos_id) == (1, size + 1)
  assert (ours / "tokenizer.model").exists() != both
  exported = transformers.AutoTokenizer.from_pretrained(back)
  original = transformers.AutoTokenizer.from_pretrained(theirs)
  assert exported.eos_token_id == original.eos_token_id == size + 1
  for text in (f"{first}hello world<|im_end|>they <s>say" for first in ("", "<|im_start|>")):
    ids = tokenizer.encode(text).tolist()
    assert ids == exported.encode(text, add_special_tokens=False)
    assert ids == original.encode(text, add_special_tokens=False)
  for text in ("<|im_end|> they say", "a  b </s>", "", "<s> "):
    assert tokenizer.encode(text).tolist() == exported.encode(text, add_special_tokens=False)


def test_a_tokenizer_that_is_gone_is_said(tmp_path, monkeypatch, capsys):
  """As is a path that is relative to another folder."""
  folder = converted(tmp_path)
  path = tmp_path / "vocabularies" / "own.json"
  path.parent.mkdir()
  (folder / "tokenizer.json").rename(path)
  file = folder / "experiment.json"
  file.write_text(file.read_text().replace("{run}/tokenizer.json", "vocabularies/own.json"))
  for flags in ((), ("--dry_run",)):
    capsys.readouterr()
    assert run(["--from=paxlike", f"--path={folder}", f"--to={tmp_path / 'back'}", *flags]) == 2
    error = capsys.readouterr().err
    assert "VOCAB_PATH=vocabularies/own.json: no such file" in error and error.count("\n") == 1
    assert not (tmp_path / "back").exists()
  monkeypatch.chdir(tmp_path)
  file.write_text(file.read_text().replace("vocabularies/own.json", "vocabularies"))
  assert run(["--from=paxlike", f"--path={folder}", "--to=back"]) == 2
  assert "VOCAB_PATH=vocabularies is a folder: give" in capsys.readouterr().err
  file.write_text(file.read_text().replace('"vocabularies"', '"vocabularies/own.json"'))
  assert run(["--from=paxlike", f"--path={folder}", "--to=back"]) == 0
  assert (tmp_path / "back" / "tokenizer.json").read_bytes() == path.read_bytes()


def test_templates_with_names_travel(tmp_path, capsys):
  source = tmp_path / "theirs"
  more = source / "additional_chat_templates"
  more.mkdir(parents=True)
  (more / "tool_use.jinja").write_text(TEMPLATE)
  ours = converted(tmp_path)
  assert run(["--from=paxlike", f"--path={ours}", f"--to={tmp_path / 'back'}"]) == 0
  for folder in (ours, tmp_path / "back"):
    assert (folder / "additional_chat_templates" / "tool_use.jinja").read_text() == TEMPLATE
  (more / "other.jinja").symlink_to("/etc/passwd")
  assert run(["--from=hf", f"--path={source}", f"--to={tmp_path / 'out'}"]) == 2
  assert "other.jinja is outside of" in capsys.readouterr().err


def test_an_export_follows_no_link_out_of_the_run(tmp_path, capsys):
  folder = converted(tmp_path)
  (folder / "tokenizer.json").rename(tmp_path / "secret.json")
  (folder / "tokenizer.json").symlink_to(tmp_path / "secret.json")
  assert run(["--from=paxlike", f"--path={folder}", f"--to={tmp_path / 'back'}"]) == 2
  assert "secret.json" in capsys.readouterr().err and not (tmp_path / "back").exists()


@pytest.mark.slow
def test_a_folder_that_was_moved_evaluates_any_text_and_decodes(tmp_path, capsys):
  text = tmp_path / "README"  # No suffix of text files.
  text.write_text(" ".join(f"t{3 + i % 50}" for i in range(200)))
  config = {"torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None}
  ours = converted(tmp_path, config).rename(tmp_path / "moved")
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
  assert "differs from the graph of the knobs in experiment.json" in capsys.readouterr().err
