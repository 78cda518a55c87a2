# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model as the `tokenizer.json` that Hugging Face reads: the same ids for a text.

Left to itself, transformers makes a tokenizer out of `tokenizer.model` by rules of its own, which
take neither its normalization nor its white space as they are.
"""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from paxlike import input_files
from paxlike.data import token_settings, tokenizer
from paxlike.data.token_settings import AddedToken
from paxlike.data.tokenizer import SentencePieceTokenizer

_UNIGRAM, _BPE, _WORD = 1, 2, 3  # Of ModelProto.TrainerSpec.ModelType.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # Of ModelProto.SentencePiece.Type.
_SPACE = "\u2581"
_CONFIG = "tokenizer_config.json"


def unfit(model: pathlib.Path) -> str | None:
  """Returns what Hugging Face has no counterpart of in a SentencePiece model; None: nothing."""
  proto = _read(model)
  spec = proto.trainer_spec
  if spec.model_type not in (_UNIGRAM, _BPE):
    return "a model of words" if spec.model_type == _WORD else "a model of characters"
  if spec.treat_whitespace_as_suffix and token_settings.TokenSettings(model).added():
    return "treat_whitespace_as_suffix beside added tokens"
  return None


def write(model: pathlib.Path, *, max_len: int):
  """Writes `tokenizer.json` and `tokenizer_config.json` beside a model, if it is not `unfit`.

  Args:
    model: A SentencePiece model; the settings beside it hold, but for their `tokenizer_class`.
    max_len: The longest sequence, for `tokenizer_config.json`.
  """
  if unfit(model):
    return
  proto = _read(model)
  settings = token_settings.TokenSettings(model)
  pieces = {piece.piece: number for number, piece in enumerate(proto.pieces)}
  spec = proto.trainer_spec
  bos = settings.token("bos_token") or _named(proto, spec.bos_id)
  adds_bos = SentencePieceTokenizer(model).bos_id is not None
  result = _tokenizer(proto, pieces, settings.added(), legacy=settings.is_legacy)
  if adds_bos:
    from tokenizers import processors

    result.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A",
      pair=f"{bos} $A {bos}:1 $B:1",
      special_tokens=[(bos, result.token_to_id(bos))],
    )
  result.save(str(model.with_name("tokenizer.json")))
  config = model.with_name(_CONFIG)
  names = {
    "bos_token": bos,
    "eos_token": _named(proto, spec.eos_id),
    "unk_token": _named(proto, spec.unk_id),
    "pad_token": _named(proto, spec.pad_id),
  }
  content = {
    **{name: token for name, token in names.items() if token is not None},
    "add_bos_token": adds_bos,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": max_len,
  }
  if config.exists():
    content = input_files.read_json(config)
    content.pop("auto_map", None)
  # Another class would take the file's vocabulary and split texts by rules of its own.
  content["tokenizer_class"] = "PreTrainedTokenizerFast"
  config.write_text(json.dumps(content, indent=2) + "\n")


def _read(model: pathlib.Path) -> Any:
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(model.read_bytes())
  return proto


def _user_defined(proto: Any) -> list[str]:
  return [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]


def _named(proto: Any, number: int) -> str | None:
  return proto.pieces[number].piece if 0 <= number < len(proto.pieces) else None


def _tokenizer(
  proto: Any, pieces: dict[str, int], added: Sequence[AddedToken], *, legacy: bool
) -> Any:
  """Returns the tokenizer, which begins no text with BOS yet."""
  import tokenizers
  from tokenizers import Regex, pre_tokenizers

  result: Any = tokenizers.Tokenizer(_model(proto, pieces))
  spec = proto.normalizer_spec
  # Without added tokens there is one text, which a step of normalization can begin.
  first = bool(added) and not legacy
  result.normalizer = _normalizer(proto, first=first)
  result.decoder = _decoder(proto)
  # Control pieces are found in texts if no settings say which tokens are.
  special = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)]
  tokens = added or [AddedToken(text) for text in special]
  tokenizer.add(result, [token._replace(normalized=False) for token in tokens])
  steps = []
  if first and spec.add_dummy_prefix and spec.remove_extra_whitespaces:
    steps.append(pre_tokenizers.Metaspace(_SPACE, "first", split=False))
  elif first and spec.add_dummy_prefix:
    # The first replaces nothing, as no " " is left, and so it prepends one whatever follows.
    steps += [
      pre_tokenizers.Metaspace(" ", "first", split=False),
      pre_tokenizers.Metaspace(_SPACE, "never", split=False),
    ]
  if whole := _user_defined(proto):
    # Found before anything is joined, the longest first, and joined with nothing.
    pattern = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
    steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
  if steps:
    result.pre_tokenizer = pre_tokenizers.Sequence(steps)
  return result


def _model(proto: Any, pieces: dict[str, int]) -> Any:
  from tokenizers import models

  byte_fallback = proto.trainer_spec.byte_fallback
  if proto.trainer_spec.model_type == _UNIGRAM:
    scored = [(piece.piece, piece.score) for piece in proto.pieces]
    return models.Unigram(scored, proto.trainer_spec.unk_id, byte_fallback)
  return models.BPE(
    pieces,
    _merges(proto, pieces),
    unk_token=_named(proto, proto.trainer_spec.unk_id),
    fuse_unk=True,
    byte_fallback=byte_fallback,
    ignore_merges=bool(_user_defined(proto)),
  )


def _merges(proto: Any, pieces: dict[str, int]) -> list[tuple[str, str]]:
  """Returns the pairs that are joined, the best piece's first: SentencePiece scores the result."""
  found = []
  for number, piece in enumerate(proto.pieces):
    if piece.type in (_UNKNOWN, _CONTROL, _USER_DEFINED):
      continue
    text = piece.piece
    pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
    known = [(a, b) for a, b in pairs if a in pieces and b in pieces]
    found += [(-piece.score, number, pieces[a], pieces[b], (a, b)) for a, b in known]
  return [pair for *_, pair in sorted(found)]


def _normalizer(proto: Any, *, first: bool) -> Any:
  """Returns the steps before a text is split.

  Args:
    proto: The model.
    first: Whether a later step begins the first text with a space, and no text behind an added
      token; else these begin each.
  """
  from tokenizers import Regex, normalizers

  spec, steps = proto.normalizer_spec, []
  if spec.precompiled_charsmap:
    # `Precompiled` takes both together for one character, and drops the second.
    steps.append(normalizers.Replace("\r\n", _normalized(proto, "\r") + _normalized(proto, "\n")))
    steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
  if spec.remove_extra_whitespaces:
    outer = " +$" if first else "^ +| +$"
    steps += [normalizers.Replace(Regex(outer), ""), normalizers.Replace(Regex(" {2,}"), " ")]
  if spec.add_dummy_prefix and proto.trainer_spec.treat_whitespace_as_suffix:
    steps.append(normalizers.Replace(Regex(r"(?<=[\s\S])\z"), _SPACE))
  elif spec.add_dummy_prefix and not first:
    steps.append(normalizers.Prepend(_SPACE))
  return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _normalized(proto: Any, text: str) -> str:
  """Returns what the map of characters makes of a text."""
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
