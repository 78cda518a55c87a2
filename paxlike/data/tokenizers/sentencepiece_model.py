# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model with the added tokens of its settings."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paxlike.data.tokenizers.token_settings import AddedToken
from paxlike.errors import UserError

_CHARACTERS_PER_THREAD = 2**16


class _Part(NamedTuple):
  """The text up to an added token, or to the end of the whole text.

  Attributes:
    text: The part.
    is_first: Whether it is the first part of its text.
    spaced: Whether the model prepends a space.
    token: The id of the added token; None at the end.
  """

  text: str
  is_first: bool
  spaced: bool
  token: int | None


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
    """Returns the ids of each text; several threads encode texts of many characters in all."""
    if self._split is None:
      return _encoded(self.model, texts)
    parts = [part for text in texts for part in self._parts(text)]
    found = {
      spaced: iter(_encoded(model, [part.text for part in parts if part.spaced == spaced]))
      for spaced, model in ((True, self.model), (False, self._inner))
    }
    ids: list[list[int]] = []
    for part in parts:
      if part.is_first:
        ids.append([])
      ids[-1] += next(found[part.spaced])
      if part.token is not None:
        ids[-1].append(part.token)
    return ids

  def _parts(self, text: str) -> Iterator[_Part]:
    assert self._split is not None
    end = 0
    for found in self._split.finditer(text):
      assert found.lastindex is not None
      token = self.ids[self._texts_found[found.lastindex - 1]]
      yield self._part(text[end : found.start()], is_first=not end, token=token)
      end = found.end()
    yield self._part(text[end:], is_first=not end)

  def _part(self, text: str, *, is_first: bool, token: int | None = None) -> _Part:
    # `model` prepends a space, `_inner` does not. The beginning of the whole text gets that space.
    # Later text keeps its own leading white space; if the model trims that off, the space that
    # `model` prepends replaces it.
    return _Part(text, is_first, is_first or (self._trims and text[:1].isspace()), token)

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


def _encoded(model: Any, texts: Sequence[str]) -> list[list[int]]:
  threads = min(sum(map(len, texts)) // _CHARACTERS_PER_THREAD, os.cpu_count() or 1)
  return model.encode(texts, num_threads=max(threads, 1)) if texts else []


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
