# SPDX-License-Identifier: Apache-2.0
"""Verification of a checkpoint's files by the checksums in its manifests."""

import base64
import concurrent.futures
import contextlib
import os
from collections.abc import Collection, Iterator, Mapping

from etils import epath

from paxlike import file_io
from paxlike.checkpoints import manifest
from paxlike.checkpoints.manifest import File, Piece
from paxlike.errors import UserError

_THREADS = min(8, os.cpu_count() or 1)


class Damaged(UserError):
  """The files of a checkpoint differ from what was written."""


class Checksums:
  """The checksums of a checkpoint, to verify its files.

  Attributes:
    files: Path relative to the checkpoint's folder -> file.
  """

  def __init__(self, folder: epath.Path, files: Mapping[str, File]):
    self._folder = folder
    self.files = files

  @property
  def num_bytes(self) -> int:
    """The size of all files."""
    return sum(file.size for file in self.files.values())

  @property
  def identity(self) -> str | None:
    """A checksum of all chunks of arrays, wherever they are stored; None on an object store."""
    pieces = [piece for file in self.files.values() for piece in file.pieces if piece.array]
    if any(piece.digest is None for piece in pieces):
      return None
    return manifest.digest("".join(sorted(f"{one.array}:{one.digest};" for one in pieces)).encode())

  def among(self, arrays: Collection[str]) -> "Checksums":
    """Returns a copy in which chunks of arrays other than `arrays` are marked as bytes of no array.

    Such bytes are always verified, so a forged array name in a manifest exempts no bytes.
    """

    def known(piece: Piece) -> Piece:
      return piece if piece.array in arrays else piece._replace(array=None)

    files = {
      name: file._replace(pieces=tuple(map(known, file.pieces)))
      for name, file in self.files.items()
    }
    return Checksums(self._folder, files)

  def verify_file(self, name: str, data: bytes):
    """Raises `Damaged` if `data` is not the content of file `name`, which holds no array."""
    file = self.files.get(name)
    if file is None or file.size != len(data):
      raise self._damaged(name, None)
    if file.crc32c is None and manifest.digest(data) != file.pieces[0].digest:
      raise self._damaged(name, None)

  def verify(self, *, arrays: Collection[str] | None):
    """Compares bytes with their checksums.

    Args:
      arrays: Arrays whose chunks are verified. Empty: only bytes of no array. None: everything.

    Raises:
      Damaged: A checksum differs.
      OSError: A file cannot be read.
    """
    with self.verifying(arrays=arrays):
      pass

  @contextlib.contextmanager
  def verifying(
    self, *, arrays: Collection[str] | None, index: int = 0, count: int = 1
  ) -> Iterator[None]:
    """Context in which threads verify the bytes while the body runs; see `verify`.

    The bytes are divided between `count` processes, of which this is `index`. A verification error
    replaces an exception of the body.
    """
    pieces = self._pieces(arrays)[index::count]
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
      work = [threads.submit(self._verify_piece, name, piece) for name, piece in pieces]
      try:
        yield
      finally:
        try:
          for done in work:
            done.result()
        finally:
          threads.shutdown(cancel_futures=True)

  def _pieces(self, arrays: Collection[str] | None) -> list[tuple[str, Piece]]:
    """Returns the (file, piece) pairs to verify, after checking the sizes of all files."""
    there = manifest.files_in(self._folder)
    remote = file_io.is_remote(self._folder)
    result = []
    for name, file in sorted(self.files.items()):
      size, crc32c = there.get(name, (None, None))
      if size is None:
        raise self._damaged(name, None, "is missing")
      if size != file.size:
        raise self._damaged(name, None, f"has {size} bytes, not {file.size}")
      chosen = [piece for piece in file.pieces if _is_of(piece, arrays)]
      if file.crc32c is None:
        result += [(name, piece) for piece in chosen]
        continue
      if (chosen or not file.pieces) and file.crc32c != (
        crc32c if remote else _crc32c(self._folder / name)
      ):
        raise self._damaged(name, ", ".join(p.array for p in file.pieces if p.array) or None)
    return result

  def _verify_piece(self, name: str, piece: Piece):
    blocks = manifest.blocks_of(self._folder / name, piece.offset, piece.length)
    if manifest.digest_of(blocks) != piece.digest:
      raise self._damaged(name, piece.array)

  def _damaged(self, name: str, array: str | None, how: str = "") -> Damaged:
    what = f"{name}{f' {how}' if how else ''}{f', array {array}' if array else ''}"
    return damaged(self._folder, what)


def _is_of(piece: Piece, arrays: Collection[str] | None) -> bool:
  if arrays is None:
    return True
  return piece.array in arrays if arrays else piece.array is None


def damaged(folder: epath.Path, what: str) -> Damaged:
  """Returns the error for a damaged checkpoint; `what` says where."""
  return Damaged(f"{folder} is damaged ({what}).")


def read(folder: epath.Path) -> Checksums | None:
  """Returns the checksums of a checkpoint; None if it was written without.

  Raises:
    Damaged: A manifest is damaged.
    OSError: A manifest cannot be read.
  """
  if not (folder / manifest.FILE).exists():
    manifest.files_in(folder)  # Refuses pipes, for which a reader would wait.
    return None
  name = manifest.FILE
  try:
    files = manifest.parsed(file_io.read_bytes(folder / manifest.FILE))
    for name in sorted(files):
      if name.startswith(f"{manifest.FOLDER}/"):
        files = files | manifest.parsed(file_io.read_bytes(folder / name))
  except (*file_io.MALFORMED, FileNotFoundError) as error:
    raise damaged(folder, f"{name}: {file_io.reason(error)}") from error
  return Checksums(folder, files)


def _crc32c(path: epath.Path) -> str:
  """Returns the CRC32C of a local copy of an object, in Base64 as stores report it.

  Raises:
    UserError: google-crc32c is not installed.
  """
  try:
    import google_crc32c
  except ImportError:
    raise UserError(
      f"{path} has the checksum of an object store: to verify it, pip install 'paxlike[gcs]'."
    ) from None
  value = 0
  for block in manifest.blocks_of(path, 0, file_io.stat(path).length):
    value = google_crc32c.extend(value, bytes(block))
  return base64.b64encode(value.to_bytes(4, "big")).decode()
