# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model with the added tokens of its settings."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paxlike.data.tokenizers.token_settings import AddedToken
from paxlike.errors import UserError


class Pieces:
  """Splits texts at added tokens and encodes the text between them by SentencePiece.

  Attributes:
    model: The `SentencePieceProcessor`.
    added: The added tokens.
    ids: Text of each added token -> its id.
    size: Exclusive upper bound of ids.
  """

  def __init__(
    self,
    content: bytes,
    added: Sequence[AddedToken],
    *,
    finds: bool = True,
    legacy: bool = False,
    place: str,
  ):
    """Loads the model in `content`; may raise the library's errors.

    Args:
      content: The model file's content.
      added: Tokens besides the model's.
      finds: Whether to recognize added tokens in texts.
      legacy: Whether every text after an added token gets the model's leading space, as in
        transformers' legacy mode; else only the beginning of the whole text does.
      place: The file, for errors.

    Raises:
      UserError: An added token is declared with another id than the next free one.
    """
    import sentencepiece

    self.added = tuple(added)
    self.model: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
    self.size = self.model.vocab_size()
    self.ids: dict[str, int] = {}
    for token in added:
      number = self.id_of(token.text)
      self.ids[token.text] = self.size if number is None else number
      self.size += number is None
    check_ids(added, self.ids, place=place)
    if unfit := next((token.text for token in added if token.single_word), None):
      raise UserError(f"{place} with {unfit!r}: a SentencePiece model has no single_word tokens.")
    self._special = {self.ids[token.text] for token in added if token.special}
    self._texts = {number: text for text, number in self.ids.items()}
    added = sorted(added, key=lambda token: -len(token.text))  # The longest match wins.
    self._texts_found = [token.text for token in added]
    self._split = _pattern(added) if finds else None
    # The model for text after an added token.
    self._inner, self._trims = self.model, False
    if added and not legacy:
      self._inner, self._trims = _without_prefix(content)

  def id_of(self, text: str) -> int | None:
    """Returns the id of a token by its text; None if there is no such token."""
    if text in self.ids:
      return self.ids[text]
    found, unknown = self.model.piece_to_id(text), self.model.unk_id()
    return None if found == unknown and self.model.id_to_piece(unknown) != text else found

  def text_of(self, number: int) -> str:
    """Returns the text of a token."""
    return self._texts.get(number) or self.model.id_to_piece(number)

  def stands_for_text(self, number: int) -> bool:
    """Returns whether a token stands for text; not control tokens, and not the unknown token."""
    if number in self._texts:
      return number not in self._special
    marks = (self.model.is_control, self.model.is_unknown, self.model.is_unused)
    return not any(is_one(number) for is_one in marks)

  def encode(self, texts: Sequence[str]) -> list[list[int]]:
    """Returns the ids of each text."""
    if self._split is None:
      return self.model.encode(texts, num_threads=1)
    return [self._encode(text) for text in texts]

  def _encode(self, text: str) -> list[int]:
    assert self._split is not None
    ids, end = [], 0
    for found in self._split.finditer(text):
      assert found.lastindex is not None
      ids += self._encode_between(text[end : found.start()], begins=not end)
      ids.append(self.ids[self._texts_found[found.lastindex - 1]])
      end = found.end()
    return ids + self._encode_between(text[end:], begins=not end)

  def _encode_between(self, text: str, *, begins: bool) -> list[int]:
    # `model` prepends a space, `_inner` does not. The beginning of the whole text gets that space.
    # Later text keeps its own leading white space; if the model trims that off, the space that
    # `model` prepends replaces it.
    begins = begins or (self._trims and text[:1].isspace())
    return (self.model if begins else self._inner).encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids, without special tokens."""
    text, run = "", []
    for number in ids:
      if number not in self._texts:
        run.append(number)
        continue
      text += self._decode(run, begins=not text)
      text += "" if number in self._special else self._texts[number]
      run = []
    return text + self._decode(run, begins=not text)

  def _decode(self, ids: list[int], *, begins: bool) -> str:
    return (self.model if begins else self._inner).decode(ids) if ids else ""


def check_ids(added: Sequence[AddedToken], ids: Mapping[str, int | None], *, place: str):
  """Raises UserError if an added token is declared with another id than in `ids` (text -> id)."""
  for token in added:
    if token.id not in (None, ids[token.text]):
      raise UserError(
        f"{place}: the settings beside it declare {token.text!r} as {token.id}, but its id is"
        f" {ids[token.text]}: the settings belong to another tokenizer."
      )


def _pattern(added: Sequence[AddedToken]) -> re.Pattern[str] | None:
  """Returns a regex that matches added tokens, one group each; None if there are none."""
  parts = []
  for token in added:
    before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    parts.append(f"{before}({re.escape(token.text)}){after}")
  return re.compile("|".join(parts)) if parts else None


def _without_prefix(content: bytes) -> tuple[Any, bool]:
  """Returns the model without its dummy prefix, and whether it trims leading white space."""
  import sentencepiece
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(content)
  trims = proto.normalizer_spec.add_dummy_prefix and proto.normalizer_spec.remove_extra_whitespaces
  proto.normalizer_spec.add_dummy_prefix = False
  return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString()), trims
