# SPDX-License-Identifier: Apache-2.0
"""Writes a tokenizer into GGUF's metadata, as llama.cpp's `convert_hf_to_gguf.py` does.

llama.cpp has two kinds of BPE: "gpt2", on bytes of words that a named rule splits, and "llama",
that of SentencePiece, which merges pieces by their scores.
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
from gguf import TokenType

from paxlike.convert import tokenizer_files
from paxlike.convert.safetensors_files import read_json
from paxlike.data.chat import templates
from paxlike.data.tokenizers import token_settings
from paxlike.errors import UserError

_SPACE = "\u2581"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
# Regular expression that splits texts -> llama.cpp's name, and whether whole words need no merges.
_SPLITS = {
  rf"{_WORDS}|\p{{N}}{{1,3}}{_REST}": ("llama-bpe", True),
  rf"{_WORDS}|\p{{N}}{_REST}": ("qwen2", False),
}
_GPT2 = "gpt-2", False
_ABSENT_SCORE = -1000.0


@dataclasses.dataclass
class _Vocabulary:
  """What GGUF stores of a tokenizer.

  Attributes:
    kind: "llama" or "gpt2".
    tokens: The text of each id.
    types: The type of each id.
    scores: Of "llama": pairs of the highest score are merged first.
    split: Of "gpt2": llama.cpp's name of the rule that splits texts into words.
    merges: Of "gpt2": pairs, in the order of merging.
    adds_space: Of "llama": whether texts begin with a space.
  """

  kind: str
  tokens: list[str]
  types: list[TokenType]
  scores: list[float] | None = None
  split: str = "default"
  merges: list[str] | None = None
  adds_space: bool = False


def add(writer: gguf.GGUFWriter, folder: pathlib.Path, config: Mapping[str, Any]):
  """Adds the tokenizer in an exported folder to a file's metadata.

  Args:
    writer: Of the file.
    folder: Holds the tokenizer's files.
    config: `config.json`, with the ids that begin and end texts.

  Raises:
    UserError: llama.cpp has no such tokenizer.
  """
  found = tokenizer_files.find(folder)
  if found is None:
    writer.add_tokenizer_model("none")
    return
  model = folder / "tokenizer.model"
  vocabulary = _of_json(found) if found.name == "tokenizer.json" else None
  if model.exists():
    vocabulary = _of_sentencepiece(model, vocabulary)
  assert vocabulary is not None
  _pad(vocabulary, config["vocab_size"])
  writer.add_tokenizer_model(vocabulary.kind)
  writer.add_tokenizer_pre(vocabulary.split)
  writer.add_token_list(vocabulary.tokens)
  writer.add_token_types(vocabulary.types)
  if vocabulary.scores is not None:
    writer.add_token_scores(vocabulary.scores)
    writer.add_add_space_prefix(vocabulary.adds_space)
  if vocabulary.merges is not None:
    writer.add_token_merges(vocabulary.merges)
  for name, add_id in (
    ("bos_token_id", writer.add_bos_token_id),
    ("eos_token_id", writer.add_eos_token_id),
    ("pad_token_id", writer.add_pad_token_id),
  ):
    if ids := token_settings.ids_of(config, name, place="config.json"):
      add_id(ids[0])
  if TokenType.UNKNOWN in vocabulary.types:
    writer.add_unk_token_id(vocabulary.types.index(TokenType.UNKNOWN))
  begins, ends = _added(folder, found, config)
  writer.add_add_bos_token(begins)
  writer.add_add_eos_token(ends)
  if (template := _chat_template(folder)) is not None:
    writer.add_chat_template(template)


def _refused(why: str) -> UserError:
  return UserError(f"llama.cpp has no tokenizer with {why}: use --to_format=hf.")


def _of_json(file: pathlib.Path) -> _Vocabulary:
  """Returns the vocabulary of a `tokenizer.json`."""
  content = read_json(file)
  model = content["model"]
  if model.get("type") != "BPE":
    raise _refused(f"a model of type {model.get('type')}")
  merges = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
  splits = _parts(content.get("pre_tokenizer"), "pretokenizers")
  if any(part["type"] == "ByteLevel" for part in splits):
    result = _byte_level(content, splits, merges)
  else:
    result = _by_scores(content, splits, merges)
  for token in content.get("added_tokens", ()):
    _set(result, token["id"], token["content"], is_special=token["special"])
  return result


def _tokens(model: Mapping[str, Any]) -> tuple[list[str], list[TokenType]]:
  vocabulary: Mapping[str, int] = model["vocab"]
  size = max(vocabulary.values(), default=-1) + 1
  tokens, types = _padding(range(size)), [TokenType.UNUSED] * size
  for token, index in vocabulary.items():
    tokens[index], types[index] = token, TokenType.NORMAL
  return tokens, types


def _byte_level(
  content: Mapping[str, Any], splits: Sequence[Mapping[str, Any]], merges: list[list[str]]
) -> _Vocabulary:
  model = content["model"]
  match splits:
    case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
      name, keeps_words = _GPT2
    case [
      {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False},
      {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
    ] if rule in _SPLITS:
      name, keeps_words = _SPLITS[rule]
    case _:
      raise _refused("this pre_tokenizer (known are those of GPT-2, Llama 3 and Qwen2)")
  if bool(model.get("ignore_merges")) != keeps_words:
    raise _refused(f"the pre_tokenizer {name} and ignore_merges={not keeps_words}")
  normalizers = _parts(content.get("normalizer"), "normalizers")
  if [part["type"] for part in normalizers] not in ([], ["NFC"]):
    raise _refused("this normalizer")
  tokens, types = _tokens(model)
  joined = [" ".join(pair) for pair in merges]
  return _Vocabulary("gpt2", tokens, types, split=name, merges=joined)


def _by_scores(
  content: Mapping[str, Any], splits: Sequence[Mapping[str, Any]], merges: list[list[str]]
) -> _Vocabulary:
  """Returns the vocabulary of a BPE with byte fallback, as exported from SentencePiece."""
  model = content["model"]
  normalizers = _parts(content.get("normalizer"), "normalizers")
  kinds = [part["type"] for part in (*normalizers, *splits)]
  if not model.get("byte_fallback") or not set(kinds) <= {
    "Prepend", "Replace", "Metaspace", "Split"
  }:  # fmt: skip
    raise _refused("this normalizer or pre_tokenizer, or without bytes")
  scores_of: dict[str, float] = {}
  for rank, pair in enumerate(merges):
    scores_of.setdefault("".join(pair), -float(rank))
  tokens, types = _tokens(model)
  for index, token in enumerate(tokens):
    if _is_byte(token):
      types[index] = TokenType.BYTE
    elif token == model.get("unk_token"):
      types[index] = TokenType.UNKNOWN
  scores = [scores_of.get(token, -float(len(merges))) for token in tokens]
  adds_space = "Prepend" in kinds or any(
    part["type"] == "Metaspace" and part.get("prepend_scheme") in ("first", "always")
    for part in splits
  )
  return _Vocabulary("llama", tokens, types, scores=scores, adds_space=adds_space)


def _of_sentencepiece(file: pathlib.Path, of_json: _Vocabulary | None) -> _Vocabulary:
  """Returns the vocabulary of a SentencePiece model, and the added tokens of its `tokenizer.json`.

  `of_json` is that of the `tokenizer.json` beside it, if any.
  """
  from sentencepiece import sentencepiece_model_pb2 as protos

  proto: Any = protos.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(file.read_bytes())
  spec, normalizer = proto.trainer_spec, proto.normalizer_spec
  if spec.model_type != spec.BPE:
    raise _refused("a SentencePiece model that is not BPE")
  if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
    raise _refused("SentencePiece's normalization (normalization_rule_name other than identity)")
  result = _Vocabulary(
    "llama",
    [piece.piece for piece in proto.pieces],
    [TokenType(piece.type) for piece in proto.pieces],
    scores=[piece.score for piece in proto.pieces],
    adds_space=normalizer.add_dummy_prefix,
  )
  more = zip(of_json.tokens, of_json.types, strict=True) if of_json is not None else ()
  for index, (text, kind) in enumerate(more):
    if index >= len(result.tokens):
      _set(result, index, text, is_special=kind == TokenType.CONTROL)
  return result


def _set(vocabulary: _Vocabulary, index: int, text: str, *, is_special: bool):
  """Makes an id an added token."""
  _pad(vocabulary, index + 1)
  if vocabulary.types[index] == TokenType.UNKNOWN:
    return
  vocabulary.tokens[index] = text if is_special else text.replace(_SPACE, " ")
  vocabulary.types[index] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED


def _pad(vocabulary: _Vocabulary, size: int):
  """Adds unused ids up to `size` ids."""
  more = range(len(vocabulary.tokens), size)
  vocabulary.tokens += _padding(more)
  vocabulary.types += [TokenType.UNUSED] * len(more)
  if vocabulary.scores is not None:
    vocabulary.scores += [_ABSENT_SCORE] * len(more)


def _padding(ids: range) -> list[str]:
  return [f"[PAD{index}]" for index in ids]


def _parts(setting: Any, name: str) -> list[Mapping[str, Any]]:
  """Returns the steps of a normalizer or pre_tokenizer."""
  if setting is None:
    return []
  return setting[name] if setting["type"] == "Sequence" else [setting]


def _is_byte(token: str) -> bool:
  return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _added(
  folder: pathlib.Path, file: pathlib.Path, config: Mapping[str, Any]
) -> tuple[bool, bool]:
  """Returns whether the exported tokenizer adds BOS and EOS to a text, as transformers reads it."""
  import tokenizers

  ids: Sequence[int] = ()
  if file.name == "tokenizer.json":
    ids = tokenizers.Tokenizer.from_file(str(file)).encode("a").ids
  bos = token_settings.ids_of(config, "bos_token_id", place="config.json")
  eos = token_settings.ids_of(config, "eos_token_id", place="config.json")
  return bool(ids) and ids[0] in bos, bool(ids) and ids[-1] in eos


def _chat_template(folder: pathlib.Path) -> str | None:
  """Returns the chat template of a folder, if it has one."""
  settings, jinja = (folder / name for name in templates.FILES[:2])
  if jinja.exists():
    return jinja.read_text()
  found = read_json(settings).get("chat_template") if settings.exists() else None
  return found if isinstance(found, str) else None
