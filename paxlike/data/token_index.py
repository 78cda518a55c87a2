# SPDX-License-Identifier: Apache-2.0
"""Documents as token ids in one flat memory-mapped file, cached in the user's cache folder."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from paxlike.errors import UserError

# int32 ids [n], or a mapping with "tokens" [n] and further columns [n], as in `TokenIndex`.
Document = np.ndarray | Mapping[str, np.ndarray]


class TokenIndex(NamedTuple):
  """Concatenated documents.

  Attributes:
    tokens: uint16 or uint32, memory-mapped.
    offsets: int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]].
    columns: Further values per token. `weights`: uint8 loss mask; `alternatives`: ids of the
      wrong answer, for multiple choice; `desirable`: uint8, 1 for all tokens of a desirable answer.
  """

  tokens: np.ndarray
  offsets: np.ndarray
  columns: Mapping[str, np.ndarray] = {}

  def fingerprint(self) -> str:
    """Returns a hash of the lengths of all documents and of the first and last million tokens."""
    digest = hashlib.sha256(self.offsets.tobytes())
    for values in (self.tokens, *self.columns.values()):
      digest.update(values[:1_000_000].tobytes())
      digest.update(values[-1_000_000:].tobytes())
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
  """Yields None if `folder` exists, else an empty folder, renamed to `folder` if the body succeeds.

  One process builds while the others wait for its lock; an interrupted build is discarded.

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


def cached(key: str, documents: Callable[[], Iterable[Document]], *, vocab_size: int) -> TokenIndex:
  """Returns the index of `documents`, from the cache if it was made before.

  Args:
    key: Identifies the documents and the tokenizer.
    documents: Called only on a cache miss.
    vocab_size: Exclusive upper bound of ids.

  Raises:
    UserError: The cache cannot be read or written.
  """
  digest = hashlib.sha256(f"{key} {vocab_size}".encode("utf-8", "surrogatepass")).hexdigest()
  folder = cache_folder() / "tokens" / digest[:24]
  with built_once(folder) as building:
    if building is not None:
      write(building, documents(), vocab_size=vocab_size)
  return read(folder, vocab_size=vocab_size)


def _dtype(column: str, vocab_size: int) -> np.dtype:
  if column in ("weights", "desirable"):
    return np.dtype(np.uint8)
  return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def read(folder: pathlib.Path, *, vocab_size: int) -> TokenIndex:
  """Returns the index that `write` put into `folder`.

  Raises:
    UserError: It is damaged.
  """
  try:
    offsets = np.load(folder / "offsets.npy")
    columns = {path.name: path for path in sorted(folder.glob("columns/*"))}
    arrays = {
      name: _mapped(path, _dtype(name, vocab_size), offsets[-1])
      for name, path in ({"tokens": folder / "tokens"} | columns).items()
    }
    return TokenIndex(arrays.pop("tokens"), offsets, arrays)
  except (OSError, ValueError, EOFError) as error:
    raise UserError(f"the cached tokens cannot be read ({error}): remove {folder}.") from error


def _mapped(path: pathlib.Path, dtype: np.dtype, num_tokens: int) -> np.ndarray:
  size = path.stat().st_size
  if size != num_tokens * dtype.itemsize:
    raise ValueError(f"{path.name} has {size} bytes, which is not {num_tokens} tokens")
  # An empty file cannot be mapped.
  return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)


def write(folder: pathlib.Path, documents: Iterable[Document], *, vocab_size: int):
  """Writes documents of ids below `vocab_size`, all with the same columns, as an index.

  Raises:
    UserError: The folder cannot be written.
  """
  offsets = [0]
  with _writing(folder.parent), contextlib.ExitStack() as stack:
    (folder / "columns").mkdir()
    files = {"tokens": stack.enter_context(open(folder / "tokens", "wb"))}
    for document in documents:
      arrays = {"tokens": document} if isinstance(document, np.ndarray) else document
      for name, values in arrays.items():
        if name not in files:
          files[name] = stack.enter_context(open(folder / "columns" / name, "wb"))
        files[name].write(values.astype(_dtype(name, vocab_size)).tobytes())
      offsets.append(offsets[-1] + len(arrays["tokens"]))
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
