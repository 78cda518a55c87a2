# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model as the `tokenizer.json` that Hugging Face reads: the same ids for a text.

Left to itself, transformers makes a tokenizer out of `tokenizer.model` by rules of its own, which
take neither its normalization nor its white space as they are.
"""

import json
import pathlib
import re
from typing import Any

from paxlike.data import token_settings

_UNIGRAM, _BPE = 1, 2  # Of ModelProto.TrainerSpec.ModelType.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # Of ModelProto.SentencePiece.Type.
_SPACE = "\u2581"
_CONFIG = "tokenizer_config.json"


def write(model: pathlib.Path, *, max_len: int):
  """Writes `tokenizer.json` and, if it is not there, `tokenizer_config.json` beside a model.

  Nothing is written for models of words and characters, which Hugging Face does not have.

  Args:
    model: A SentencePiece model.
    max_len: The longest sequence, for `tokenizer_config.json`.
  """
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(model.read_bytes())
  if proto.trainer_spec.model_type not in (_UNIGRAM, _BPE):
    return
  settings = token_settings.TokenSettings(model)
  pieces = {piece.piece: number for number, piece in enumerate(proto.pieces)}
  spec = proto.trainer_spec
  bos = _named(proto, spec.bos_id)
  adds_bos = bos is not None and settings.adds_bos is not False
  _tokenizer(proto, pieces, bos if adds_bos else None).save(str(model.with_name("tokenizer.json")))
  config = model.with_name(_CONFIG)
  if config.exists():
    return
  names = {
    "bos_token": bos,
    "eos_token": _named(proto, spec.eos_id),
    "unk_token": _named(proto, spec.unk_id),
    "pad_token": _named(proto, spec.pad_id),
  }
  told = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **{name: token for name, token in names.items() if token is not None},
    "add_bos_token": adds_bos,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": max_len,
  }
  config.write_text(json.dumps(told, indent=2) + "\n")


def _user_defined(proto: Any) -> list[str]:
  return [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED]


def _named(proto: Any, number: int) -> str | None:
  return proto.pieces[number].piece if 0 <= number < len(proto.pieces) else None


def _tokenizer(proto: Any, pieces: dict[str, int], bos: str | None) -> Any:
  """Returns the tokenizer, which begins texts with `bos`, if that is given."""
  import tokenizers
  from tokenizers import AddedToken, Regex, pre_tokenizers, processors

  result: Any = tokenizers.Tokenizer(_model(proto, pieces))
  result.normalizer = _normalizer(proto)
  result.decoder = _decoder(proto)
  special = [piece.piece for piece in proto.pieces if piece.type in (_UNKNOWN, _CONTROL)]
  result.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
  if whole := _user_defined(proto):
    # Found before anything is joined, the longest first, and joined with nothing.
    pattern = "|".join(re.escape(text) for text in sorted(whole, key=len, reverse=True))
    result.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
  if bos is not None:
    result.post_processor = processors.TemplateProcessing(
      single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, pieces[bos])]
    )
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


def _normalizer(proto: Any) -> Any:
  from tokenizers import Regex, normalizers

  spec, steps = proto.normalizer_spec, []
  if spec.precompiled_charsmap:
    steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
  if spec.remove_extra_whitespaces:
    steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
  if spec.add_dummy_prefix:
    steps.append(normalizers.Prepend(_SPACE))
  return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _decoder(proto: Any) -> Any:
  from tokenizers import decoders

  steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
  if proto.normalizer_spec.add_dummy_prefix:
    steps.append(decoders.Strip(" ", 1, 0))
  return decoders.Sequence(steps)
