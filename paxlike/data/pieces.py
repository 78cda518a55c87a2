# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model together with the tokens that settings beside it add."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paxlike.data.token_settings import AddedToken
from paxlike.errors import UserError


class Pieces:
  """Encodes what stands between added tokens by SentencePiece.

  Attributes:
    model: The `SentencePieceProcessor`.
    added: The added tokens.
    ids: Text of each added token -> its id.
    size: Ids are below it.
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
    """Loads the model in `content`; errors are those of the library.

    Args:
      content: The file.
      added: Tokens beside those of the model.
      finds: Whether these are found in a text, before it is split any further.
      legacy: Whether each text between them begins as a text does, with a space, and not the
        first alone.
      place: The file, for people.

    Raises:
      UserError: An added token has another id than the next.
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
    added = sorted(added, key=lambda token: -len(token.text))  # The longest is found.
    self._texts_found = [token.text for token in added]
    self._split = _pattern(added) if finds else None
    # Of what follows an added token.
    self._inner, self._trims = self.model, False
    if added and not legacy:
      self._inner, self._trims = _without_prefix(content)

  def id_of(self, text: str) -> int | None:
    """Returns the id of a token's text; None if there is none."""
    if text in self.ids:
      return self.ids[text]
    found, unknown = self.model.piece_to_id(text), self.model.unk_id()
    return None if found == unknown and self.model.id_to_piece(unknown) != text else found

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
    # A model that trims white space and then begins with one space: a text that begins with white
    # space keeps one if the model adds it, and none if it does not.
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
  """Raises UserError if an added token is declared with another id than in `ids`, by its text."""
  for token in added:
    if token.id not in (None, ids[token.text]):
      raise UserError(
        f"{place}: the settings beside it declare {token.text!r} as {token.id}, but its id is"
        f" {ids[token.text]}: they are of another tokenizer."
      )


def _pattern(added: Sequence[AddedToken]) -> re.Pattern[str] | None:
  """Returns what finds added tokens in a text, each as its own group; None: there are none."""
  parts = []
  for token in added:
    before, after = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    parts.append(f"{before}({re.escape(token.text)}){after}")
  return re.compile("|".join(parts)) if parts else None


def _without_prefix(content: bytes) -> tuple[Any, bool]:
  """Returns a model that begins texts without a space, and whether it drops those they have."""
  import sentencepiece
  from sentencepiece import sentencepiece_model_pb2

  proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
  proto.ParseFromString(content)
  trims = proto.normalizer_spec.add_dummy_prefix and proto.normalizer_spec.remove_extra_whitespaces
  proto.normalizer_spec.add_dummy_prefix = False
  return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString()), trims
