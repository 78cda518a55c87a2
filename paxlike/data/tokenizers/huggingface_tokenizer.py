# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of Hugging Face."""

import functools
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.data.tokenizers import sentencepiece_model, token_settings, tokenizer_classes
from paxlike.data.tokenizers.file_tokenizer import (
  FileTokenizer,
  library_errors,
  piece_length,
  without_surrogates,
)
from paxlike.data.tokenizers.tokenizer import Encoded


@configurable
class HuggingFaceTokenizer(FileTokenizer):
  """A Hugging Face `tokenizer.json`; BOS and EOS are from the settings beside it."""

  kind = "not a tokenizer.json"

  def _load(self, content: bytes) -> tuple[Any, int]:
    import tokenizers

    model: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    model.no_truncation()  # The file may enable truncation and padding.
    model.no_padding()
    model.encode_special_tokens = self._settings.splits_special
    tokenizer_classes.apply(model, self._settings)
    added = self._settings.added(self._defaults)
    add_tokens(model, added)
    ids = {token.text: model.token_to_id(token.text) for token in added}
    sentencepiece_model.check_ids(added, ids, place=f"VOCAB_PATH={self._path}")
    model.encode("a", add_special_tokens=True)  # Fails if the post-processor lacks a token.
    return model, 1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1)

  @functools.cached_property
  def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
    return 1 + max(self._model.get_vocab(with_added_tokens=True).values())

  @functools.cached_property
  def eos_id(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    found = self._id_in_role("eos_token")
    return next(iter(self.end_ids), None) if found is None else found

  @functools.cached_property
  def bos_id(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    adds = self._settings.adds_bos
    if adds is False:
      return None
    found = self._template_start()
    if adds:
      return self._bos_asked_for(found)
    if found is not None or self._settings.has_tokenizer_config:
      return found
    # No file specifies how texts begin, so the generation configuration's BOS is used.
    return next((i for i in self._settings.ids("bos_token_id") if i != self.eos_id), None)

  def _template_start(self) -> int | None:
    """Returns the id that the post-processor prepends to a text; None if none."""
    known = itertools.islice(self._model.get_vocab(with_added_tokens=False), 100)
    for text in ("a", *known):
      with library_errors(f"VOCAB_PATH={self._path} cannot encode"):
        found = self._model.encode(text, add_special_tokens=True)
      if 0 in found.special_tokens_mask:  # A word-level tokenizer drops unknown words.
        return found.ids[0] if found.special_tokens_mask[0] else None
    return None

  def _id_of(self, token: str) -> int | None:
    return self._model.token_to_id(token)

  @functools.cached_property
  def _added(self) -> Mapping[int, Any]:
    """The added tokens by id."""
    return self._model.get_added_tokens_decoder()

  @functools.cached_property
  def _is_of_bytes(self) -> bool:
    """Whether each character of a token stands for a byte, as in GPT-2."""
    decoder = json.loads(self._model.to_str())["decoder"]  # One, or a sequence of several.
    return '"ByteLevel"' in json.dumps(decoder)

  def _length_of(self, number: int) -> int:
    text, added = self.text_of(number), self._added.get(number)
    if added is not None and added.special:
      return 0
    if not self._is_of_bytes:
      return piece_length(text)
    return len(text) if added is None else len(text.encode())

  def text_of(self, number: int) -> str:
    return self._model.id_to_token(number) or ""

  def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
    with library_errors(f"VOCAB_PATH={self._path} cannot encode"):
      encoded = self._model.encode_batch(without_surrogates(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encoded]

  def encode_with_offsets(self, text: str) -> Encoded:
    with library_errors(f"VOCAB_PATH={self._path} cannot encode"):
      (given,) = without_surrogates([text])
      found = self._model.encode(given, add_special_tokens=False)
    return Encoded(np.array(found.ids, np.int32), np.array(found.offsets, int).reshape(-1, 2))

  def fingerprint(self) -> str:
    return f"tokenizer.json {hashlib.sha256(self._model.to_str().encode()).hexdigest()}"


def add_tokens(model: Any, added: Sequence[token_settings.AddedToken]):
  """Adds tokens to a `tokenizers.Tokenizer`; those not in its vocabulary get the next ids."""
  import tokenizers

  there = {token.content for token in model.get_added_tokens_decoder().values()}
  model.add_tokens(
    [
      tokenizers.AddedToken(
        token.text,
        special=token.special,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
        normalized=token.normalized,
      )
      for token in added
      if token.text not in there
    ]
  )
