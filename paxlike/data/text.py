# SPDX-License-Identifier: Apache-2.0
"""Text files of the user as a corpus."""

import functools
import glob
import json
import os
import sys
from collections.abc import Iterator

import numpy as np

from paxlike.data import records, token_index
from paxlike.data.corpus import Corpus
from paxlike.data.tokenizer import CharacterTokenizer, SentencePieceTokenizer, Tokenizer
from paxlike.errors import UserError

SUFFIXES = (".txt", *records.SUFFIXES)


class TextFiles(Corpus):
  """Documents in files: a .txt file is one, and so is a record of any other."""

  def __init__(
    self,
    *,
    path: str | None,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    field: str = "text",
  ):
    """Reads nothing yet.

    Args:
      path: A file, a folder (searched with its sub-folders) or a glob.
      tokenizer: None: a token for each character that occurs in the files.
      vocab_size: Ids that the model knows.
      field: The field or column that holds the text.
    """
    self._path = path
    self._given_tokenizer = tokenizer
    self._vocab_size = vocab_size
    self._field = field

  def check(self):
    _ = self._files
    if isinstance(self.tokenizer, SentencePieceTokenizer):
      self.tokenizer.check()
    needed = self.tokenizer.vocab_size
    if needed > self._vocab_size:
      raise UserError(
        f"VOCAB_SIZE={self._vocab_size}, but the tokenizer has {needed} ids: set"
        f" --fdl.VOCAB_SIZE={needed}."
      )

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:  # pyright: ignore[reportIncompatibleVariableOverride]
    """The one given, or that of the characters of the files."""
    if self._given_tokenizer is not None:
      return self._given_tokenizer
    alphabet: set[str] = set()
    for text in self._texts():
      alphabet.update(text)
    return CharacterTokenizer("".join(alphabet))

  @functools.cached_property
  def _files(self) -> list[str]:
    if not self._path:
      raise UserError("DATA_PATH is not set: give --fdl.DATA_PATH=, a file, a folder or a glob.")
    path = os.path.expanduser(self._path)
    if os.path.isdir(path):
      found = glob.glob(os.path.join(glob.escape(path), "**", "*"), recursive=True)
      files = [name for name in found if name.endswith(SUFFIXES)]
    else:
      files = [path] if os.path.isfile(path) else glob.glob(path, recursive=True)
    files = sorted(name for name in files if os.path.isfile(name))
    if not files:
      what = "holds no" if os.path.isdir(path) else "matches no"
      raise UserError(f"DATA_PATH={self._path} {what} file; wanted: {', '.join(SUFFIXES)}.")
    for name in files:
      if not name.endswith(SUFFIXES):
        raise UserError(f"DATA_PATH: {name} is none of {', '.join(SUFFIXES)}.")
      if not os.access(name, os.R_OK):
        raise UserError(f"DATA_PATH: {name} cannot be read.")
    return files

  def index(self) -> token_index.TokenIndex:
    return self._index

  @functools.cached_property
  def _index(self) -> token_index.TokenIndex:
    try:
      stats = [(name, os.stat(name)) for name in map(os.path.abspath, self._files)]
    except OSError as error:
      raise UserError(f"DATA_PATH: {error.filename} cannot be read: {error.strerror}.") from error
    files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    key = json.dumps([files, self._field, self.tokenizer.fingerprint()])
    index = token_index.cached(key, self._encoded, vocab_size=self.tokenizer.vocab_size)
    if index.offsets[-1] == 0:
      raise UserError(f"DATA_PATH={self._path} holds no text.")
    return index

  def _encoded(self) -> Iterator[np.ndarray]:
    size = sum(os.path.getsize(name) for name in self._files)
    print(f"tokenizing {len(self._files)} files, {size / 1e6:.1f} MB (once)", file=sys.stderr)
    for text in self._texts():
      yield self.tokenizer.encode(text)

  def _texts(self) -> Iterator[str]:
    for name in self._files:
      try:
        yield from read(name, self._field)
      except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"DATA_PATH: {name} cannot be read: {error}.") from error


def read(name: str, field: str) -> Iterator[str]:
  """Yields the documents of one file.

  Raises:
    UserError: A record lacks the field, or see `records.read`.
    OSError, EOFError, UnicodeDecodeError: See there.
  """
  if name.endswith(".txt"):
    with open(name, encoding="utf-8", newline="") as file:
      yield file.read()
    return
  for place, record in records.read(name, [field]):
    text = record.get(field, ())
    if text is None:
      continue
    if not isinstance(text, str):
      there = ", ".join(record)
      raise UserError(f"{place}: no text in field {field!r}: set DATA_FIELD. It has: {there}.")
    yield text
