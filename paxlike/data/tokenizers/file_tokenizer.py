# SPDX-License-Identifier: Apache-2.0
"""What tokenizers in files (VOCAB_PATH) share: reading, special tokens, errors of libraries."""

import abc
import contextlib
import functools
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike import untrusted_files
from paxlike.config import ranges
from paxlike.data.tokenizers import token_settings, tokenizer_classes
from paxlike.data.tokenizers.token_settings import TOKENIZER_BYTES
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError

_MAX_IDS = 2**31  # Ids are int32.
# A tokenizer that changes texts (adds a space in front, merges white space, removes accents, or has
# one id for all unknown characters) changes the length of one of these.
_PROBES = (
  "a",
  " a  b ",
  "\n\n\tif x:\r\n    y = 10_000  # “ﬁ①Ⅳ”",
  "Straße, Ångström, ÀÉ, Ελλάδα",
  "İ",  # Lower case takes another number of bytes.
  "日本語の문장, ไทย, 👩‍👧 \U00013000 \u3000\u00a0.",
)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@contextlib.contextmanager
def library_errors(what: str) -> Iterator[None]:
  """Context that converts any error of a tokenizer library, which has no error types.

  Raises:
    UserError: The call failed; the message begins with `what`.
  """
  try:
    yield
  except UserError:
    raise
  except BaseException as error:
    # A panic of a Rust library is not an Exception.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
      raise
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise UserError(f"{what}: {said.rstrip('.')}.") from error


@contextlib.contextmanager
def _without_stacks() -> Iterator[None]:
  """Context that captures stderr, and prints it at the end unless the body raises.

  A Rust library that panics prints its native stack, which is dropped that way.
  """
  with tempfile.TemporaryFile() as printed:
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(printed.fileno(), 2)
    try:
      yield
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
    printed.seek(0)
    os.write(2, printed.read())


class FileTokenizer(Tokenizer):
  """A tokenizer in a file (VOCAB_PATH), which is read when first needed."""

  kind: str

  def __init__(self, path: ranges.Path | os.PathLike[str]):
    self._path = os.fspath(path)
    self._settings = token_settings.TokenSettings(path)

  def check(self, vocab_size: int):
    super().check(vocab_size)
    self._settings.check_ids(vocab_size)
    _ = self.bos_id, self.eos_id, self.prefix_id, self.end_ids

  @property
  def path(self) -> pathlib.Path:
    """The file."""
    return pathlib.Path(self._path)

  @property
  def end_ids(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
    return self._settings.ids("eos_token_id")

  @property
  def prefix_id(self) -> int | None:
    # The declared BOS, even if texts do not begin with it.
    found = self._id_in_role("bos_token")
    if found is None:
      found = next(iter(self._settings.ids("bos_token_id")), None)
    return super().prefix_id if found is None else found

  def _id_in_role(self, role: str) -> int | None:
    """Returns the id of the token that the settings name for `bos_token` or `eos_token`."""
    named = self._settings.roles(self._defaults).get(role)
    return None if named is None else self._id_of(named)

  @functools.cached_property
  def _defaults(self) -> Mapping[str, str]:
    """Role -> text, for roles that the settings do not specify."""
    return tokenizer_classes.tokens(self._settings)

  def _bos_asked_for(self, own: int | None) -> int:
    """Returns the id of BOS if `add_bos_token` is true: the settings' bos_token, else the file's.

    Args:
      own: The id of BOS in the tokenizer's own file; None if it has none.

    Raises:
      UserError: There is neither.
    """
    named = self._id_in_role("bos_token")
    found = own if named is None else named
    if found is None:
      raise UserError(
        f"{self._settings.path(token_settings.FILES[0])}: add_bos_token is true, but there is no"
        " bos_token: add one, or set add_bos_token to false."
      )
    return found

  def byte_lengths(self) -> np.ndarray | None:
    found = np.array([self._length_of(number) for number in range(self.vocab_size)], np.int32)
    encoded = zip(_PROBES, self.encode_all(_PROBES), strict=True)
    adds_up = all(found[ids].sum() == len(text.encode()) for text, ids in encoded)
    return found if adds_up else None

  @abc.abstractmethod
  def _length_of(self, number: int) -> int:
    """Returns the bytes of an id, on the assumption that the tokenizer changes no text."""

  @abc.abstractmethod
  def _id_of(self, token: str) -> int | None:
    """Returns the id of a token by its text; None if there is no such token."""

  @functools.cached_property
  def _model(self) -> Any:
    if not os.path.lexists(self._path):
      raise UserError(f"VOCAB_PATH={self._path}: no such file.")
    token_settings.check_file(self._path)
    path = pathlib.Path(self._path)
    content = untrusted_files.read(path, limit=TOKENIZER_BYTES)
    with library_errors(f"VOCAB_PATH={path} is {self.kind}"), _without_stacks():
      model, size = self._load(content)
      if not 0 < size < _MAX_IDS:
        raise UserError(f"VOCAB_PATH={path} is {self.kind}: it has {size} ids.")
    return model

  @abc.abstractmethod
  def _load(self, content: bytes) -> tuple[Any, int]:
    """Returns the model in the file and its number of ids; may raise the library's errors."""

  def encode(self, text: str) -> np.ndarray:
    return self.encode_all([text])[0]

  def decode(self, ids: np.ndarray) -> str:
    with library_errors(f"VOCAB_PATH={self._path} cannot decode"):
      return self._model.decode([int(i) for i in ids if i < self.vocab_size])


def piece_length(piece: str) -> int:
  """Returns the bytes of a piece: of one byte `<0x0A>`, else of its text with ▁ for spaces."""
  return 1 if _BYTE.fullmatch(piece) else len(piece.replace("▁", " ").encode())


def without_surrogates(texts: Sequence[str]) -> list[str]:
  """Replaces lone surrogates: JSON may have them, but UTF-8, and so the libraries, may not."""
  return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
