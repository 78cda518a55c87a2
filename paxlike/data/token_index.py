# SPDX-License-Identifier: Apache-2.0
"""Documents as token ids in one flat file: made once, kept in the user's cache folder."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from paxlike.errors import UserError


class TokenIndex(NamedTuple):
  """Documents one after another.

  Attributes:
    tokens: uint16 or uint32, mapped from disk.
    offsets: int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]].
  """

  tokens: np.ndarray
  offsets: np.ndarray

  def fingerprint(self) -> str:
    """Returns a hash of the lengths of all documents and of the first and last million tokens."""
    digest = hashlib.sha256(self.offsets.tobytes())
    digest.update(self.tokens[:1_000_000].tobytes())
    digest.update(self.tokens[-1_000_000:].tobytes())
    return digest.hexdigest()[:24]


def cache_folder() -> pathlib.Path:
  """Returns $PAXLIKE_CACHE, or `paxlike` in the user's cache folder."""
  if own := os.environ.get("PAXLIKE_CACHE"):
    return pathlib.Path(own)
  return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paxlike"


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except OSError as error:
    reason = error.strerror or error
    raise UserError(
      f"the cache folder {folder} cannot be written ({reason}): set PAXLIKE_CACHE to another."
    ) from None


@contextlib.contextmanager
def built_once(folder: pathlib.Path) -> Iterator[pathlib.Path | None]:
  """Yields None if `folder` exists, else an empty folder that becomes it if the context ends well.

  Of several processes one builds and the others wait; a killed build leaves nothing that counts.

  Raises:
    UserError: The cache cannot be written.
  """
  if os.path.isdir(folder):
    yield None
    return
  with _writing(folder.parent):
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = open(f"{folder}.lock", "w")  # noqa: SIM115 - closed below.
  with lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if folder.is_dir():
      yield None
      return
    building = pathlib.Path(f"{folder}.building")
    with _writing(folder.parent):
      if building.is_dir():
        shutil.rmtree(building)
      building.mkdir()
    yield building
    building.rename(folder)


def cached(
  key: str, documents: Callable[[], Iterable[np.ndarray]], *, vocab_size: int
) -> TokenIndex:
  """Returns the index of `documents`, from the cache if it was made before.

  Args:
    key: A text that is another for other documents or another tokenizer.
    documents: Called only where the index has to be made: int32 ids of one document after another.
    vocab_size: Ids are below it.

  Raises:
    UserError: The cache cannot be read or written.
  """
  digest = hashlib.sha256(f"{key} {vocab_size}".encode("utf-8", "surrogatepass")).hexdigest()
  folder = cache_folder() / "tokens" / digest[:24]
  with built_once(folder) as building:
    if building is not None:
      write(building, documents(), vocab_size=vocab_size)
  return read(folder, vocab_size=vocab_size)


def _dtype(vocab_size: int) -> type[np.unsignedinteger]:
  return np.uint16 if vocab_size <= 2**16 else np.uint32


def read(folder: pathlib.Path, *, vocab_size: int) -> TokenIndex:
  """Returns the index that `write` put into `folder`.

  Raises:
    UserError: It is damaged.
  """
  dtype = _dtype(vocab_size)
  try:
    offsets = np.load(folder / "offsets.npy")
    size = (folder / "tokens").stat().st_size
    if size != offsets[-1] * np.dtype(dtype).itemsize:
      raise ValueError(f"{size} bytes of tokens where {offsets[-1]} tokens are due")
    if size == 0:  # An empty file cannot be mapped.
      return TokenIndex(np.zeros(0, dtype), offsets)
    return TokenIndex(np.memmap(folder / "tokens", dtype, "r"), offsets)
  except (OSError, ValueError, EOFError) as error:
    raise UserError(f"the cached tokens cannot be read ({error}): remove {folder}.") from error


def write(folder: pathlib.Path, documents: Iterable[np.ndarray], *, vocab_size: int):
  """Writes documents of ids below `vocab_size` as an index.

  Raises:
    UserError: The folder cannot be written.
  """
  dtype = _dtype(vocab_size)
  offsets = [0]
  with _writing(folder.parent), open(folder / "tokens", "wb") as flat:
    for ids in documents:
      flat.write(ids.astype(dtype).tobytes())
      offsets.append(offsets[-1] + len(ids))
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
