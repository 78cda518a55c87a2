# SPDX-License-Identifier: Apache-2.0
"""Exports a SentencePiece model as a `tokenizer.json` that gives the same ids.

Without that file, transformers converts `tokenizer.model` itself, and changes its normalization and
its handling of white space.
"""

import json
import pathlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from paxlike import untrusted_files
from paxlike.data.tokenizers import huggingface_tokenizer, token_settings, tokenizer_classes
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.token_settings import AddedToken

_UNIGRAM, _BPE, _WORD = 1, 2, 3  # Of ModelProto.TrainerSpec.ModelType.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6  # Of SentencePiece.Type.
_BYTE_NAME = ("<", "0", "x", "[0-9A-F]", "[0-9A-F]", ">")  # In regular expressions.
_SPACE = "\u2581"
_CONFIG = "tokenizer_config.json"


def unsupported(model: pathlib.Path) -> str | None:
  """Returns the feature of a SentencePiece model that Hugging Face lacks; None if it lacks none."""
  proto = _read(model)
  spec = proto.trainer_spec
  if spec.model_type not in (_UNIGRAM, _BPE):
    return "a model of words" if spec.model_type == _WORD else "a model of characters"
  settings = token_settings.TokenSettings(model)
  if spec.treat_whitespace_as_suffix and settings.added(tokenizer_classes.tokens(settings)):
    return "treat_whitespace_as_suffix beside added tokens"
  if spec.model_type == _BPE and any(piece.type == _UNUSED for piece in proto.pieces):
    return "unused pieces, which are merged and then split again"
  if _matches_whole_pieces(proto) and _has_bytes(proto) and _byte_split(proto) is None:
    return "pieces that overlap the names of byte pieces"
  return None


def difference(model: pathlib.Path) -> str | None:
  """Returns how the exported `tokenizer.json` differs from a model; None if it does not."""
  if not _read(model).normalizer_spec.precompiled_charsmap:
    return None
  return (
    "tokenizer.json can lose a combining mark, or another character of the same grapheme, because"
    " the library tokenizers normalizes a grapheme as a whole: sentencepiece keeps it"
  )


def write(model: pathlib.Path, *, max_len: int):
  """Writes `tokenizer.json` and `tokenizer_config.json` beside a model, unless it is `unsupported`.

  Args:
    model: A SentencePiece model; the settings beside it are kept, except for `tokenizer_class`.
    max_len: The longest sequence, for `tokenizer_config.json`.
  """
  if unsupported(model):
    return
  proto = _read(model)
  settings = token_settings.TokenSettings(model)
  spec = proto.trainer_spec
  named = {
    "bos_token": _named(proto, spec.bos_id),
    "eos_token": _named(proto, spec.eos_id),
    "unk_token": _named(proto, spec.unk_id),
    "pad_token": _named(proto, spec.pad_id),
  }
  own = {role: token for role, token in named.items() if token is not None}
  by_class = tokenizer_classes.tokens(settings)
  tokens = found = settings.added(by_class)
  names = by_class if found else own
  if not found:
    # Without settings that list added tokens, control pieces are recognized in texts.
    special = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    tokens = [AddedToken(text) for text in special]
  result = _tokenizer(proto, tokens, first=bool(found) and not settings.is_legacy)
  ids = SentencePieceTokenizer(model)
  roles = {**own, **settings.roles(names)}
  bos = [] if ids.bos_id is None else [(roles["bos_token"], ids.bos_id)]
  eos = [(roles["eos_token"], ids.eos_id)] if settings.adds_eos and "eos_token" in roles else []
  if bos or eos:
    from tokenizers import processors

    before, after = ([text for text, _ in ends] for ends in (bos, eos))
    single = [*before, "$A", *after]
    second = [f"{part}:1" for part in (*before, "$B", *after)]
    result.post_processor = processors.TemplateProcessing(
      single=single, pair=[*single, *second], special_tokens=[*bos, *eos]
    )
  result.save(str(model.with_name("tokenizer.json")))
  config = model.with_name(_CONFIG)
  content = {
    "add_bos_token": bool(bos),
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": max_len,
  }
  if config.exists():
    content = untrusted_files.read_json(config)
    content.pop("auto_map", None)
  # Any other class would use the file's vocabulary with its own splitting rules.
  content = {**names, **content, "tokenizer_class": "PreTrainedTokenizerFast"}
  config.write_text(json.dumps(content, indent=2) + "\n")


def _read(model: pathlib.Path) -> Any:
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(model.read_bytes())
  return proto


def _user_defined(proto: Any) -> list[str]:
  return [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]


def _matches_whole_pieces(proto: Any) -> bool:
  """Returns whether pieces match texts directly, and not only as results of merges."""
  return proto.trainer_spec.model_type == _UNIGRAM or bool(_user_defined(proto))


def _has_bytes(proto: Any) -> bool:
  return any(piece.type == _BYTE for piece in proto.pieces)


def _byte_split(proto: Any) -> str | None:
  """Returns a regex that splits the names of byte pieces in texts, so that they match no piece.

  None: wherever a name could be split, another piece spans the same characters.
  """
  others = [piece.piece for piece in proto.pieces if piece.type != _BYTE]
  for place in range(1, len(_BYTE_NAME)):
    last, after = _BYTE_NAME[place - 1], "".join(_BYTE_NAME[place:])
    across = re.compile(last + _BYTE_NAME[place])
    if not any(across.search(text) for text in others):
      before = "".join(_BYTE_NAME[: place - 1])
      return (f"(?<={before})" if before else "") + f"{last}(?={after})"
  return None


def _named(proto: Any, number: int) -> str | None:
  return proto.pieces[number].piece if 0 <= number < len(proto.pieces) else None


def _tokenizer(proto: Any, tokens: Sequence[AddedToken], *, first: bool) -> Any:
  """Returns the tokenizer without its post-processor.

  Args:
    proto: The model.
    tokens: The added tokens, which are matched before texts are split.
    first: Whether only the beginning of the whole text gets the model's leading space, and text
      after an added token does not. Without added tokens there is no difference, and the normalizer
      adds the space.
  """
  import tokenizers
  from tokenizers import Regex, pre_tokenizers

  result: Any = tokenizers.Tokenizer(_model(proto, {token.text for token in tokens}))
  spec = proto.normalizer_spec
  result.normalizer = _normalizer(proto, first=first)
  result.decoder = _decoder(proto)
  huggingface_tokenizer.add_tokens(result, [token._replace(normalized=False) for token in tokens])
  steps = []
  if first and spec.add_dummy_prefix and spec.remove_extra_whitespaces:
    steps.append(pre_tokenizers.Metaspace(_SPACE, "first", split=False))
  elif first and spec.add_dummy_prefix:
    # Metaspace prepends nothing to a text that begins with its replacement character. Normalized
    # texts never begin with " ", so the first step always prepends one, which the second replaces.
    steps += [
      pre_tokenizers.Metaspace(" ", "first", split=False),
      pre_tokenizers.Metaspace(_SPACE, "never", split=False),
    ]
  if whole := _user_defined(proto):
    # Matched before any merge, the longest first, and never merged.
    pattern = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
    steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
  if _matches_whole_pieces(proto) and _has_bytes(proto) and (pattern := _byte_split(proto)):
    steps.append(pre_tokenizers.Split(Regex(pattern), "merged_with_previous"))
  if steps:
    result.pre_tokenizer = pre_tokenizers.Sequence(steps)
  return result


def _model(proto: Any, tokens: Collection[str]) -> Any:
  """Returns the pieces and their merges; `tokens` are the texts that are matched before."""
  from tokenizers import models

  # No normalized text has a " ", so these pieces match only where `tokens` has them.
  hidden = [
    piece.type in (_UNKNOWN, _CONTROL, _UNUSED) and piece.piece not in tokens
    for piece in proto.pieces
  ]
  texts = [
    f"{piece.piece} " if hides else piece.piece
    for hides, piece in zip(hidden, proto.pieces, strict=True)
  ]
  byte_fallback = proto.trainer_spec.byte_fallback
  if proto.trainer_spec.model_type == _UNIGRAM:
    scores = (
      0.0 if hides else piece.score for hides, piece in zip(hidden, proto.pieces, strict=True)
    )
    scored = list(zip(texts, scores, strict=True))
    return models.Unigram(scored, proto.trainer_spec.unk_id, byte_fallback)
  pieces = {text: number for number, text in enumerate(texts)}
  return models.BPE(
    pieces,
    _merges(proto, pieces),
    unk_token=texts[proto.trainer_spec.unk_id],
    fuse_unk=True,
    byte_fallback=byte_fallback,
    ignore_merges=bool(_user_defined(proto)),
  )


def _merges(proto: Any, pieces: dict[str, int]) -> list[tuple[str, str]]:
  """Returns the merges, that of the best piece first: SentencePiece scores the result."""
  found = []
  for number, piece in enumerate(proto.pieces):
    if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE):
      continue
    text = piece.piece
    pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
    known = [(a, b) for a, b in pairs if a in pieces and b in pieces]
    found += [(-piece.score, number, pieces[a], pieces[b], (a, b)) for a, b in known]
  return [pair for *_, pair in sorted(found)]


def _normalizer(proto: Any, *, first: bool) -> Any:
  """Returns the normalizer.

  Args:
    proto: The model.
    first: As in `_tokenizer`. If true, the pre-tokenizer adds the leading space; else the
      normalizer adds it to every text.
  """
  from tokenizers import Regex, normalizers

  spec, steps = proto.normalizer_spec, []
  if spec.precompiled_charsmap:
    # `Precompiled` treats both as one grapheme, and drops the second.
    steps.append(normalizers.Replace("\r\n", _normalized(proto, "\r") + _normalized(proto, "\n")))
    steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
  if spec.remove_extra_whitespaces:
    # Text after an added token keeps its own leading space, as it gets none from the model.
    inner = first and spec.add_dummy_prefix
    outer = f"[ {_SPACE}]+$" if inner else f"^ +|[ {_SPACE}]+$"
    steps += [normalizers.Replace(Regex(outer), ""), normalizers.Replace(Regex(" {2,}"), " ")]
  if spec.add_dummy_prefix and proto.trainer_spec.treat_whitespace_as_suffix:
    steps.append(normalizers.Replace(Regex(r"(?<=[\s\S])\z"), _SPACE))
  elif spec.add_dummy_prefix and not first:
    steps.append(normalizers.Prepend(_SPACE))
  return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _normalized(proto: Any, text: str) -> str:
  """Returns a text normalized by the character map alone."""
  import sentencepiece

  normalizer = sentencepiece.SentencePieceNormalizer(
    model_proto=proto.SerializeToString(),
    add_dummy_prefix=False,
    escape_whitespaces=False,
    remove_extra_whitespaces=False,
  )
  return normalizer.normalize(text)


def _decoder(proto: Any) -> Any:
  from tokenizers import decoders

  steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  if proto.normalizer_spec.add_dummy_prefix and not proto.trainer_spec.treat_whitespace_as_suffix:
    steps.append(decoders.Strip(" ", 1, 0))
  return decoders.Sequence(steps)
