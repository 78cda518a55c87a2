# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to token ids and back."""

import abc
import contextlib
import functools
import hashlib
import itertools
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike import untrusted_files
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.tokenizers import sentencepiece_model, token_settings, tokenizer_classes
from paxlike.data.tokenizers.token_settings import TOKENIZER_BYTES
from paxlike.errors import UserError


class Tokenizer(abc.ABC):
  """Text to ids and back: decode(encode(text)) == text.

  Attributes:
    vocab_size: Exclusive upper bound of ids.
    eos_id: Ends a document; None if there is none.
    bos_id: Begins a document; None if there is none.
    prefix_id: The input before a text whose first token is scored too; None if there is none.
    end_ids: Ids besides eos_id at which generation stops.
  """

  vocab_size: int
  eos_id: int | None = None
  bos_id: int | None = None
  end_ids: tuple[int, ...] = ()

  @property
  def prefix_id(self) -> int | None:
    return self.eos_id if self.bos_id is None else self.bos_id

  @abc.abstractmethod
  def encode(self, text: str) -> np.ndarray:
    """Returns int32 ids [n], without EOS or BOS."""

  @abc.abstractmethod
  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of ids; EOS and BOS are skipped."""

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Returns an identifier that changes with the encoding."""

  def text_of(self, number: int) -> str:
    """Returns a token's text for use in a template; "" if it has none."""
    del number
    return ""

  def check(self, vocab_size: int):
    """Raises UserError if its file is missing or damaged, or has more ids than `vocab_size`."""
    if self.vocab_size > vocab_size:
      raise UserError(
        f"VOCAB_SIZE={vocab_size}, but the tokenizer has {self.vocab_size} ids: set"
        f" --fdl.VOCAB_SIZE={self.vocab_size} for a new model; for existing weights, set TOKENIZER"
        " and VOCAB_PATH to their tokenizer."
      )

  def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns the ids of each text."""
    return [self.encode(text) for text in texts]


@configurable
class ByteTokenizer(Tokenizer):
  """UTF-8 bytes as ids 0-255; 256 is EOS."""

  vocab_size = 257
  eos_id = 256

  def encode(self, text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8).astype(np.int32)

  def decode(self, ids: np.ndarray) -> str:
    ids = np.asarray(ids)
    return ids[ids < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

  def fingerprint(self) -> str:
    return "bytes"


@configurable
class CharacterTokenizer(Tokenizer):
  """The characters that occur in a text, in the order of their code points."""

  def __init__(self, alphabet: str):
    self.alphabet = "".join(sorted(set(alphabet)))
    self.vocab_size = len(self.alphabet)
    self._points = np.array([ord(char) for char in self.alphabet], np.uint32)

  def encode(self, text: str) -> np.ndarray:
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    ids = np.searchsorted(self._points, points)
    known = ids < len(self._points)
    known[known] = self._points[ids[known]] == points[known]
    if not known.all():
      unknown = chr(points[np.argmin(known)])
      raise UserError(
        f"the character {unknown!r} is not in the tokenizer: its training text does not have it."
      )
    return ids.astype(np.int32)

  def decode(self, ids: np.ndarray) -> str:
    return "".join(self.alphabet[i] for i in np.asarray(ids) if i < self.vocab_size)

  def fingerprint(self) -> str:
    return (
      f"characters {hashlib.sha256(self.alphabet.encode('utf-8', 'surrogatepass')).hexdigest()}"
    )


_MAX_IDS = 2**31  # Ids are int32.


@contextlib.contextmanager
def _library(what: str) -> Iterator[None]:
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
    with _library(f"VOCAB_PATH={path} is {self.kind}"), _without_stacks():
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
    with _library(f"VOCAB_PATH={self._path} cannot decode"):
      return self._model.decode([int(i) for i in ids if i < self.vocab_size])


def _without_surrogates(texts: Sequence[str]) -> list[str]:
  """Replaces lone surrogates: JSON may have them, but UTF-8, and so the libraries, may not."""
  return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]


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

  def text_of(self, number: int) -> str:
    return self._model.text_of(number)

  def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
    with _library(f"VOCAB_PATH={self._path} cannot encode"):
      encoded = self._model.encode(_without_surrogates(texts))
    return [np.array(ids, np.int32) for ids in encoded]

  def fingerprint(self) -> str:
    content = self._model.model.serialized_model_proto()
    if self._model.ids:
      settings = self._settings
      how = (self._model.added, settings.is_legacy, settings.splits_special)
      content += repr(how).encode()
    return f"sentencepiece {hashlib.sha256(content).hexdigest()}"


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
    add(model, added)
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
      with _library(f"VOCAB_PATH={self._path} cannot encode"):
        found = self._model.encode(text, add_special_tokens=True)
      if 0 in found.special_tokens_mask:  # A word-level tokenizer drops unknown words.
        return found.ids[0] if found.special_tokens_mask[0] else None
    return None

  def _id_of(self, token: str) -> int | None:
    return self._model.token_to_id(token)

  def text_of(self, number: int) -> str:
    return self._model.id_to_token(number) or ""

  def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
    with _library(f"VOCAB_PATH={self._path} cannot encode"):
      encoded = self._model.encode_batch(_without_surrogates(texts), add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encoded]

  def fingerprint(self) -> str:
    return f"tokenizer.json {hashlib.sha256(self._model.to_str().encode()).hexdigest()}"


def add(model: Any, added: Sequence[token_settings.AddedToken]):
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
