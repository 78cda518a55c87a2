# SPDX-License-Identifier: Apache-2.0
"""Files of token ids as llm.c writes them, such as those of FineWeb for the nanoGPT speedrun.

A file has a header of 256 int32: a magic number, a version and the number of tokens; then the
tokens as uint16. `python data/cached_fineweb10B.py` of github.com/KellerJordan/modded-nanogpt
downloads such files of FineWeb, tokenized as by GPT-2.
"""

import functools
import hashlib
import os

import numpy as np
from etils import epath

from paxlike import file_io
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import Arrays, RowDataset
from paxlike.errors import UserError

_MAGIC, _VERSION, _HEADER = 20240520, 1, 256


@configurable
class TokenShards(RowDataset):
  """Consecutive tokens of files, in order; documents are not separated.

  No sequence spans two files; tokens at the end of a file that fill no sequence are left out.
  """

  def __init__(
    self,
    *,
    path: ranges.Path | None,
    prefix: ranges.Name,
    seq_len: ranges.Size,
    vocab_size: ranges.Size,
  ):
    """Reads nothing yet.

    Args:
      path: The folder.
      prefix: What the names of the files begin with; they end with ".bin".
      seq_len: T.
      vocab_size: The exclusive upper bound of ids.
    """
    self.seq_len = seq_len
    self._path = path
    self._prefix = prefix
    self._vocab_size = vocab_size

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  @property
  def named(self) -> str:
    return f"DATA_PATH={self._path}, files {self._prefix}*.bin"

  def check(self):
    """See `Dataset.check`.

    Raises:
      UserError: There is no such file, or one has another format.
    """
    _ = self._ends

  def fingerprint(self) -> str:
    heads = b"".join(np.asarray(tokens[:1024]).tobytes() for tokens in self._files)
    sizes = [len(tokens) for tokens in self._files]
    return f"{hashlib.sha256(heads).hexdigest()} {sizes} {self.seq_len}"

  def num_rows(self, epoch: int) -> int:
    del epoch
    return int(self._ends[-1])

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    del epoch
    found = [self._row(number) for number in numbers.tolist()]
    tokens = np.array(found, np.int32).reshape(-1, self.seq_len + 1)
    if tokens.max(initial=0) >= self._vocab_size:
      most = int(tokens.max())
      raise UserError(f"{self.named}: id {most} is not below VOCAB_SIZE={self._vocab_size}.")
    weights = np.ones((len(tokens), self.seq_len), np.float32)
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
    return {"inputs": inputs, "targets": targets, "weights": weights}

  def _row(self, number: int) -> np.ndarray:
    file = int(np.searchsorted(self._ends, number, side="right"))
    first = (number - int(self._ends[file - 1] if file else 0)) * self.seq_len
    return self._files[file][first : first + self.seq_len + 1]

  @functools.cached_property
  def _ends(self) -> np.ndarray:
    """The number of sequences up to the end of each file."""
    return np.cumsum([(len(tokens) - 1) // self.seq_len for tokens in self._files])

  @functools.cached_property
  def _files(self) -> list[np.ndarray]:
    if self._path is None:
      raise UserError("DATA_PATH is required: --fdl.DATA_PATH=FOLDER with files of token ids.")
    folder = epath.Path(self._path)
    found = sorted(folder.glob(f"{self._prefix}*.bin")) if folder.is_dir() else []
    if not found:
      raise UserError(f"DATA_PATH={self._path} has no file {self._prefix}*.bin.")
    return [_opened(path) for path in found]


def _opened(path: epath.Path) -> np.ndarray:
  """Returns the tokens of a file, mapped into memory.

  Raises:
    UserError: It has another format, or is cut off.
  """
  try:
    header = np.fromfile(os.fspath(path), np.int32, _HEADER)
    tokens = np.memmap(os.fspath(path), np.uint16, "r", offset=4 * _HEADER)
  except (OSError, *file_io.MALFORMED) as error:
    raise UserError(f"{path} cannot be read: {file_io.reason(error)}.") from error
  if len(header) < _HEADER or header[0] != _MAGIC or header[1] != _VERSION:
    raise UserError(f"{path} is not a file of token ids as llm.c writes them (version {_VERSION}).")
  if len(tokens) != header[2]:
    raise UserError(f"{path} is cut off: {len(tokens):,} of {header[2]:,} tokens are there.")
  return tokens
