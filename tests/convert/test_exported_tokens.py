# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model is the same tokenizer in transformers."""

import pytest
from helpers.tiny_tokenizers import TEXTS, large, sentencepiece, words, write_json

from paxlike.convert import sentencepiece_json, tokenizer_files
from paxlike.convert.main import run
from paxlike.data.chat import templates
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

ENDED = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize(
  "settings",
  [
    {"add_bos_token": True, "chat_template": ENDED},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_bos_token": False, "add_eos_token": True},
    {"bos_token": "<s>", "add_bos_token": True, "chat_template": ENDED},
  ],
)
def test_what_a_class_names_and_adds_stays_in_an_export(tmp_path, settings):
  import transformers

  theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
  large(theirs)
  options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 390}
  options |= {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
  sentencepiece(theirs / "tokenizer.model", hard_vocab_limit=False, **options)
  write_json(theirs / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **settings})
  assert run(["--from=hf", f"--path={theirs}", f"--to={ours}"]) == 0
  assert run(["--from=paxlike", f"--path={ours}", f"--to={back}"]) == 0
  tokenizer = SentencePieceTokenizer(ours / "tokenizer.model")
  exported, original = (transformers.AutoTokenizer.from_pretrained(p) for p in (back, theirs))
  for role in ("bos_token", "eos_token", "unk_token"):
    assert getattr(exported, role) == getattr(original, role) is not None
  for text in ("hello world", "they </s>say"):
    assert exported.encode(text) == original.encode(text)
    plain = exported.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text).tolist() == plain
  if "chat_template" in settings:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "they"}]
    expected = original.apply_chat_template(talk, tokenize=False)
    assert exported.apply_chat_template(talk, tokenize=False) == expected
    parts = templates.template("tokenizer", vocab_path=str(ours / "tokenizer.model"))(talk)
    assert "".join(part.text for part in parts) == expected == "<s>hello</s>they</s>"


@pytest.mark.slow
def test_an_export_has_no_file_of_another_tokenizer(tmp_path):
  source = tmp_path / "theirs"
  large(source)
  model = sentencepiece(
    source / "tokenizer.model", model_type="bpe", vocab_size=390, hard_vocab_limit=False
  )
  assert run(["--from=hf", f"--path={source}", f"--to={tmp_path / 'ours'}"]) == 0
  words().save(str(tmp_path / "ours" / "tokenizer.json"))
  assert run(["--from=paxlike", f"--path={tmp_path / 'ours'}", f"--to={tmp_path / 'back'}"]) == 0
  got = HuggingFaceTokenizer(tmp_path / "back" / "tokenizer.json")
  assert got.encode("hello they say").tolist() == model.encode("hello they say")


def retyped(path, kind, pieces):
  """Changes the type of some pieces."""
  from sentencepiece import sentencepiece_model_pb2

  proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(path.read_bytes())
  for piece in proto.pieces:
    if pieces(piece.piece) and piece.type == 1:
      piece.type = kind
  path.write_bytes(proto.SerializeToString())


def are_of_three(piece):
  return len(piece) == 3


@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"user_defined_symbols": ["he"]}])
def test_a_control_piece_that_no_settings_name_is_text(tmp_path, options):
  model = tmp_path / "tokenizer.model"
  options = {"model_type": "bpe", "control_symbols": ["<ctl>"], "byte_fallback": True, **options}
  sentencepiece(model, vocab_size=390, hard_vocab_limit=False, **options)
  write_json(tmp_path / "tokenizer_config.json", {"eos_token": "</s>", "bos_token": "<s>"})
  sentencepiece_json.write(model, max_len=32)
  theirs = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  for text in ("<ctl>", "they <ctl> say", "he<ctl>he"):
    ids = SentencePieceTokenizer(model).encode(text).tolist()
    assert theirs.encode(text).tolist() == ids and 3 not in ids


@pytest.mark.parametrize("named", [("bos_token", "eos_token"), ("bos_token", "unk_token"), ()])
@pytest.mark.parametrize("prefix", [True, False])
def test_names_and_white_space_of_a_text_are_what_they_are_in_the_run(tmp_path, named, prefix):
  model = tmp_path / "tokenizer.model"
  options = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
  options |= {"add_dummy_prefix": prefix, "vocab_size": 390, "hard_vocab_limit": False}
  sentencepiece(model, **options)
  names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
  if named:
    settings = {"add_bos_token": True, **{name: names[name] for name in named}}
    write_json(tmp_path / "tokenizer_config.json", settings)
  sentencepiece_json.write(model, max_len=32)
  ours = SentencePieceTokenizer(model)
  theirs = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
  texts = ("they </s> say", " hello", "  hello  they ", "\u2581", "so\u00e9\u2581")
  for text in (*texts, *(("see <unk> here", "they <s>say") if named else ())):
    assert theirs.encode(text).tolist() == ours.encode(text).tolist(), text


@pytest.mark.parametrize(("rule", "loses"), [("identity", False), ("nmt_nfkc", True)])
def test_what_an_export_of_a_tokenizer_can_lose_is_said(tmp_path, rule, loses):
  model = tmp_path / "tokenizer.model"
  options = {"vocab_size": 390, "hard_vocab_limit": False, "byte_fallback": True}
  options |= {"normalization_rule_name": rule}
  expected = sentencepiece(model, model_type="bpe", **options)
  sentencepiece_json.write(model, max_len=32)
  got = HuggingFaceTokenizer(tmp_path / "tokenizer.json").encode("t\u2122\u0300").tolist()
  assert (got != expected.encode("t\u2122\u0300")) == loses
  assert bool(tokenizer_files.notes(tmp_path)) == loses


@pytest.mark.parametrize("kind", ["word", "char", "bpe"])
def test_a_model_without_counterpart_is_said(tmp_path, capsys, kind):
  source = tmp_path / "theirs"
  large(source)
  model = source / "tokenizer.model"
  size = 300 if kind == "bpe" else 50
  sentencepiece(model, model_type=kind, vocab_size=size, hard_vocab_limit=False)
  if kind == "bpe":
    retyped(model, 5, are_of_three)
  assert run(["--from=hf", f"--path={source}", f"--to={tmp_path / 'ours'}"]) == 0
  capsys.readouterr()
  assert run(["--from=paxlike", f"--path={tmp_path / 'ours'}", f"--to={tmp_path / 'back'}"]) == 0
  assert "has no tokenizer.json, as Hugging Face has nothing like" in capsys.readouterr().out
  assert not (tmp_path / "back" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  "options",
  [
    {"model_type": "bpe"},
    {"model_type": "bpe", "treat_whitespace_as_suffix": True},
    {"model_type": "unigram", "remove_extra_whitespaces": False},
    {
      "model_type": "bpe",
      "byte_fallback": True,
      "normalization_rule_name": "identity",
      "remove_extra_whitespaces": False,
    },
    {"model_type": "bpe", "user_defined_symbols": ["<x>", "he"], "add_dummy_prefix": False},
    {"model_type": "unigram", "byte_fallback": True},
    {"model_type": "unigram", "bos_id": -1},
    {"model_type": "unigram", "retype": 5},
    {"model_type": "unigram", "byte_fallback": True, "user_defined_symbols": ["<0", "he"]},
  ],
)
def test_transformers_tokenizes_an_export_as_sentencepiece_does(tmp_path, options):
  import transformers

  ours = tmp_path / "ours"
  large(tmp_path / "theirs")
  path = tmp_path / "theirs" / "tokenizer.model"
  options, retype = dict(options), options.get("retype")
  options.pop("retype", None)
  expected = sentencepiece(path, vocab_size=390, hard_vocab_limit=False, **options)
  if retype is not None:
    retyped(path, retype, are_of_three)
    expected.Load(str(path))
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
