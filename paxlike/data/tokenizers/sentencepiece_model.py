# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model with the added tokens of its settings."""

import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from paxlike.data.tokenizers.token_settings import AddedToken
from paxlike.errors import UserError

_CHARACTERS_PER_THREAD = 2**16
# The library takes longer per character in longer texts.
_CHARACTERS_PER_PART = 2**10
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # In pieces.
_WORD_END = re.compile("(?<=[0-9A-Za-z]) ")
_SPANS_WORDS = re.compile(f"[0-9A-Za-z][{_SPACE} ]")
# None of their rules begins with a letter or digit of ASCII and goes on with a space.
_NORMALIZATIONS = ("identity", "nfkc", "nfkc_cf", "nmt_nfkc", "nmt_nfkc_cf")


class _Part(NamedTuple):
  """The text up to an added token, up to a space between words, or to the end of the whole text.

  Attributes:
    text: The part.
    is_first: Whether it is the first part of its text.
    spaced: Whether `model` encodes it, which may prepend a space.
    token: The id of the added token that follows, if one does.
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
    self._legacy = legacy
    if added and not legacy:
      _ = self._inner  # Here, since it may raise the library's errors.

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
    parts = [part for text in texts for part in self._parts(text)]
    spaced = _encoded(self.model, [part.text for part in parts if part.spaced])
    others = [part.text for part in parts if not part.spaced]
    # Most models never need `_inner`.
    inner = _encoded(self._inner, others) if others else []
    found = {True: iter(spaced), False: iter(inner)}
    ids: list[list[int]] = []
    for part in parts:
      if part.is_first:
        ids.append([])
      ids[-1] += next(found[part.spaced])
      if part.token is not None:
        ids[-1].append(part.token)
    return ids

  def _parts(self, text: str) -> Iterator[_Part]:
    end = 0
    for found in self._split.finditer(text) if self._split else ():
      assert found.lastindex is not None
      token = self.ids[self._texts_found[found.lastindex - 1]]
      yield from self._words(text[end : found.start()], is_first=not end, token=token)
      end = found.end()
    yield from self._words(text[end:], is_first=not end)

  def _words(self, text: str, *, is_first: bool, token: int | None = None) -> Iterator[_Part]:
    """Yields the text between added tokens, in parts of whole words if it is long."""
    # `model` prepends a space, `_inner` does not. The beginning of the whole text gets that space,
    # and in legacy mode all text after an added token. Other text keeps its own leading white
    # space; if the model trims that off, the space that `model` prepends replaces it.
    spaced = is_first or self._legacy or (text[:1].isspace() and self._format.trims)
    begin = 0
    while len(text) - begin > 2 * _CHARACTERS_PER_PART and self._format.has_words:
      word_end = _WORD_END.search(text, begin + _CHARACTERS_PER_PART)
      if word_end is None:
        break
      yield _Part(text[begin : word_end.start()], is_first, spaced, None)
      begin = word_end.start()
      is_first, spaced = False, self._format.trims
    yield _Part(text[begin:], is_first, spaced, token)

  @functools.cached_property
  def _format(self) -> "_Format":
    return _Format.of(self.model.serialized_model_proto())

  @functools.cached_property
  def _inner(self) -> Any:
    """The model of text inside a whole text: it prepends no space."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_proto=self._format.without_prefix)

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
    model = self.model if begins or self._legacy else self._inner
    return model.decode(ids) if ids else ""


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


class _Format(NamedTuple):
  """What a model file says of white space and words.

  Attributes:
    trims: Whether the model prepends a space to a text in place of its leading white space.
    has_words: Whether words are encoded independently of each other, with the spaces before them.
    without_prefix: The file of a model that prepends nothing.
  """

  trims: bool
  has_words: bool
  without_prefix: bytes

  @classmethod
  def of(cls, content: bytes) -> Self:
    """Reads a model file's content."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    proto.ParseFromString(content)
    has_words = _has_words(proto)
    normalizer = proto.normalizer_spec
    trims = normalizer.add_dummy_prefix and normalizer.remove_extra_whitespaces
    normalizer.add_dummy_prefix = False
    return cls(trims, has_words, proto.SerializeToString())


def _has_words(proto: Any) -> bool:
  """Returns whether no merge of BPE spans a letter or digit of ASCII and the space after it.

  A unigram model chooses among sums of scores, which are rounded differently in parts.
  """
  trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
  pieces = [piece.piece for piece in proto.pieces]
  return (
    trainer.model_type == trainer.BPE
    and not trainer.treat_whitespace_as_suffix
    and normalizer.name in _NORMALIZATIONS
    and normalizer.escape_whitespaces
    and (normalizer.add_dummy_prefix or not normalizer.remove_extra_whitespaces)
    and _SPACE in pieces  # Else it is unknown, and unknown characters are merged.
    and not any(_SPANS_WORDS.search(piece) for piece in pieces)
  )
