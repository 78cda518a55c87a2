# SPDX-License-Identifier: Apache-2.0
"""The interface of tokenizers, text to token ids and back; tokenizers of bytes and characters."""

import abc
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxlike.config.configurable import configurable
from paxlike.errors import UserError


class Encoded(NamedTuple):
  """The ids of a text.

  Attributes:
    ids: int32 [n].
    offsets: int [n, 2], where each token begins and ends in the text, in characters.
  """

  ids: np.ndarray
  offsets: np.ndarray


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

  @property
  def stop_ids(self) -> frozenset[int]:
    """All ids at which generation stops: EOS, BOS and `end_ids`."""
    return frozenset({self.eos_id, self.bos_id, *self.end_ids} - {None})

  @abc.abstractmethod
  def encode(self, text: str) -> np.ndarray:
    """Returns int32 ids [n], without EOS or BOS."""

  @abc.abstractmethod
  def decode(self, ids: np.ndarray) -> str:
    """Returns the text of ids; EOS and BOS are skipped."""

  def continuation(self, prompt: np.ndarray, tokens: Sequence[int]) -> str:
    """Returns the text that `tokens` add to that of a prompt, int32 [n]."""
    # Decoded together, since tokenizers drop a space at the start of a text.
    whole = np.concatenate([prompt, np.asarray(tokens, np.int32)]).astype(np.int32)
    return self.decode(whole)[len(self.decode(prompt)) :]

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Returns an identifier that changes with the encoding."""

  def text_of(self, number: int) -> str:
    """Returns a token's text for use in a template; "" if it has none."""
    del number
    return ""

  def byte_lengths(self) -> np.ndarray | None:
    """Returns the number of UTF-8 bytes of text that each id stands for, int32 [vocab_size].

    It is 0 for ids that stand for no text, such as EOS. The lengths of the ids of a text add up to
    its bytes. None: this tokenizer changes texts, or its ids have no fixed lengths.
    """
    return None

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

  def encode_with_offsets(self, text: str) -> Encoded | None:
    """Returns the ids of a text with their places; None if this tokenizer does not know them."""
    del text
    return None


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

  def byte_lengths(self) -> np.ndarray:
    return (np.arange(self.vocab_size) < 256).astype(np.int32)

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

  def byte_lengths(self) -> np.ndarray:
    encoded = (char.encode("utf-8", "surrogatepass") for char in self.alphabet)
    return np.array([*map(len, encoded)], np.int32)

  def fingerprint(self) -> str:
    return (
      f"characters {hashlib.sha256(self.alphabet.encode('utf-8', 'surrogatepass')).hexdigest()}"
    )
