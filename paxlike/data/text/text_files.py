# SPDX-License-Identifier: Apache-2.0
"""A corpus of the user's text files."""

import functools
import json
import os
import pathlib
import sys
from collections.abc import Iterator

import numpy as np

from paxlike import untrusted_files
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data import token_index
from paxlike.data.corpus import Corpus
from paxlike.data.text import find_files, records
from paxlike.data.tokenizers.tokenizer import CharacterTokenizer, Tokenizer
from paxlike.errors import UserError

SUFFIXES = (".txt", *records.SUFFIXES)

_BATCH_CHARACTERS = 2**20  # Of texts that are tokenized together.
TEXT_BYTES = 2**32  # The largest .txt file: it is one document, read into memory whole.


@configurable
class TextFiles(Corpus):
  """Documents in files: each record of a record file, or a whole file of any other suffix."""

  def __init__(
    self,
    *,
    path: ranges.Path | None,
    tokenizer: Tokenizer | None,
    vocab_size: ranges.Size,
    field: ranges.Name = "text",
    knob: str = "DATA_PATH",
  ):
    """Reads nothing yet.

    Args:
      path: A file, a folder (searched with its sub-folders) or a glob.
      tokenizer: The tokenizer. None: one token per character that occurs in the files.
      vocab_size: The model's vocabulary size.
      field: The field or column that holds the text.
      knob: The knob that errors name.
    """
    self._knob = knob
    self._path = path
    self._given_tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._field = field

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  @property
  def named(self) -> str:
    return f"{self._knob}={self._path}"

  def check(self):
    _ = self._files
    self.tokenizer.check(self._vocab_size)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
    """The given tokenizer, or one of the characters that occur in the files."""
    if self._given_tokenizer is not None:
      return self._given_tokenizer
    alphabet: set[str] = set()
    for text in self._texts():
      alphabet.update(text)
    return CharacterTokenizer("".join(alphabet))

  @functools.cached_property
  def _files(self) -> list[str]:
    return find_files.find(self._path, SUFFIXES, knob=self._knob, any_single=True)

  def index(self) -> token_index.TokenIndex:
    return self._index

  @functools.cached_property
  def _index(self) -> token_index.TokenIndex:
    stamps = find_files.stamps(self._files, knob=self._knob)
    key = json.dumps([stamps, self._field, self.tokenizer.fingerprint()])
    index = token_index.cached(key, self._encoded, vocab_size=self.tokenizer.vocab_size)
    if index.offsets[-1] == 0:
      raise UserError(f"{self._knob}={self._path} has no text.")
    return index

  def _encoded(self) -> Iterator[np.ndarray]:
    size = sum(os.path.getsize(name) for name in self._files)
    print(f"tokenizing {len(self._files)} files, {size / 1e6:.1f} MB (once)", file=sys.stderr)
    for texts in _batches(self._texts()):
      yield from self.tokenizer.encode_all(texts)

  def _texts(self) -> Iterator[str]:
    for name in self._files:
      try:
        yield from read(name, self._field)
      except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{self._knob}: {name} cannot be read: {error}.") from error


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
  """Yields the texts in lists of about a million characters; tokenizers are parallel over texts."""
  batch, size = [], 0
  for text in texts:
    batch.append(text)
    size += len(text)
    if size >= _BATCH_CHARACTERS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def read(name: str, field: str) -> Iterator[str]:
  """Yields the documents of one file.

  Raises:
    UserError: A record lacks the field, or the file is malformed.
    OSError, EOFError, UnicodeDecodeError: As `records.read`.
  """
  if not name.endswith(records.SUFFIXES):
    text = untrusted_files.read_text(pathlib.Path(name), limit=TEXT_BYTES)
    yield text.removeprefix(untrusted_files.BOM)
    return
  for place, record in records.read(name, [field]):
    text = record.get(field, ())
    if text is None:
      continue
    if not isinstance(text, str):
      there = ", ".join(record)
      raise UserError(f"{place}: no text in field {field!r}: set DATA_FIELD. It has: {there}.")
    yield text
