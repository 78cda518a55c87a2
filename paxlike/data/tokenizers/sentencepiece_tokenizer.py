# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of SentencePiece."""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.tokenizers import sentencepiece_model
from paxlike.data.tokenizers.file_tokenizer import (
  FileTokenizer,
  library_errors,
  piece_length,
  without_surrogates,
)
from paxlike.errors import UserError


@configurable
class SentencePieceTokenizer(FileTokenizer):
  """A SentencePiece model (Kudo and Richardson, 2018)."""

  kind = "not a SentencePiece model"

  def _load(self, content: bytes) -> tuple[sentencepiece_model.Pieces, int]:
    if not content:
      raise UserError(f"VOCAB_PATH={self._path} is empty.")  # The library accepts this.
    settings = self._settings
    model = sentencepiece_model.Pieces(
      content,
      settings.added(self._defaults),
      finds=not settings.splits_special,
      legacy=settings.is_legacy,
      place=f"VOCAB_PATH={self._path}",
    )
    return model, model.size

  @property
  def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
    return self._model.size

  @functools.cached_property
  def eos_id(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    found = self._id_in_role("eos_token")
    if found is None and self._model.model.eos_id() >= 0:
      return self._model.model.eos_id()
    return next(iter(self.end_ids), None) if found is None else found

  @functools.cached_property
  def bos_id(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    own = self._model.model.bos_id()
    if self._settings.adds_bos is False or (own < 0 and not self._settings.adds_bos):
      return None
    return self._bos_asked_for(own if own >= 0 else None)

  def _id_of(self, token: str) -> int | None:
    return self._model.id_of(token)

  def _length_of(self, number: int) -> int:
    return piece_length(self.text_of(number)) if self._model.stands_for_text(number) else 0

  def text_of(self, number: int) -> str:
    return self._model.text_of(number)

  def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
    with library_errors(f"VOCAB_PATH={self._path} cannot encode"):
      encoded = self._model.encode(without_surrogates(texts))
    return [np.array(ids, np.int32) for ids in encoded]

  def fingerprint(self) -> str:
    content = self._model.model.serialized_model_proto()
    if self._model.ids:
      settings = self._settings
      how = (self._model.added, settings.is_legacy, settings.splits_special)
      content += repr(how).encode()
    return f"sentencepiece {hashlib.sha256(content).hexdigest()}"
