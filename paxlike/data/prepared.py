# SPDX-License-Identifier: Apache-2.0
"""Tokenized sequences in ArrayRecord files, read with random access through Grain.

A folder holds `<split>-00000-of-00008.array_record`, one sequence per record, and `prepared.json`,
which lists the splits, their files, and the arrays of a record with their dtypes and further dims.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from etils import epath

from paxlike import file_io
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import ENDLESS, Arrays, RowDataset
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError

INFO = "prepared.json"
# The most probable next tokens of a teacher, int32 [B, T, K], and their log-probabilities, float32.
TOP_K = ("teacher_ids", "teacher_log_probabilities")
_CHUNK = 256


@configurable
class PreparedRows(RowDataset):
  """A split of a folder that `write` made. If shuffled, every epoch has its own order."""

  def __init__(
    self,
    *,
    path: ranges.Path | None,
    split: ranges.Name,
    seq_len: ranges.Size,
    vocab_size: ranges.Size,
    tokenizer: Tokenizer | None = None,
    seed: ranges.NonNegative = 0,
    shuffle: bool = True,
  ):
    """Reads nothing yet.

    Args:
      path: The folder.
      split: Its split.
      seq_len: T; must equal the prepared one.
      vocab_size: The model's vocabulary size.
      tokenizer: The tokenizer it was prepared with; None if no text is needed.
      seed: Seed of the shuffle.
      shuffle: Whether to shuffle the sequences.
    """
    self.seq_len = seq_len
    self._path = path
    self._split = split
    self._vocab_size = vocab_size
    self._tokenizer = tokenizer
    self._seed = seed
    self._shuffle = shuffle

  @property
  def tokenizer(self) -> Tokenizer | None:
    return self._tokenizer

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  @property
  def named(self) -> str:
    return f"DATA_PATH={self._path}, split {self._split}"

  def check(self):
    info = self._info
    if self._split not in info["splits"]:
      there = ", ".join(info["splits"])
      raise UserError(f"DATA_PATH={self._path} has no split {self._split}: it has {there}.")
    if missing := [name for name in self._files if not epath.Path(name).exists()]:
      raise UserError(f"DATA_PATH: {missing[0]} is missing.")
    for knob, given, prepared in (
      ("MAX_SEQ_LEN", self.seq_len, info["seq_len"]),
      ("VOCAB_SIZE", self._vocab_size, info["vocab_size"]),
    ):
      if given < prepared or (knob == "MAX_SEQ_LEN" and given != prepared):
        raise UserError(f"{knob}={given}, but DATA_PATH={self._path} was prepared with {prepared}.")
    if self._tokenizer is not None and self._tokenizer.fingerprint() != info["tokenizer"]:
      raise UserError(
        f"DATA_PATH={self._path} was prepared with another tokenizer: set TOKENIZER, and VOCAB_PATH"
        " if it has a file."
      )

  def fingerprint(self) -> str:
    order = (self._split, self._seed, self._shuffle)
    return f"prepared {self._info['fingerprint']} {order}"

  def num_rows(self, epoch: int) -> int:
    del epoch
    return self._info["splits"][self._split]

  def no_rows(self) -> Arrays:
    columns = self._info["columns"][self._split]
    return {
      name: np.zeros((0, self.seq_len, *more), dtype) for name, (_, dtype, *more) in columns.items()
    }

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    first = epoch * self.num_rows(epoch)
    columns = self._info["columns"][self._split]
    sizes = [
      self.seq_len * math.prod(more) * np.dtype(stored).itemsize
      for stored, _, *more in columns.values()
    ]
    records = b"".join(self._records[first + int(number)] for number in numbers)
    packed = np.frombuffer(records, np.uint8).reshape(len(numbers), sum(sizes))
    arrays, at = {}, 0
    for (name, (stored, dtype, *more)), size in zip(columns.items(), sizes, strict=True):
      array = packed[:, at : at + size].copy().view(stored).astype(dtype)
      arrays[name] = array.reshape(len(numbers), self.seq_len, *more)
      at += size
    return arrays

  @property
  def teacher(self) -> Mapping[str, Any] | None:
    """The record of the teacher whose predictions the sequences have; None: they have none."""
    return self._info.get("teacher")

  @functools.cached_property
  def _info(self) -> dict[str, Any]:
    if not self._path:
      raise UserError(
        "DATA_PATH is not set: give --fdl.DATA_PATH=DIR (made by scripts/prepare_data.py)."
      )
    file = file_io.absolute(self._path) / INFO
    try:
      return json.loads(file.read_text())
    except (OSError, ValueError) as error:
      raise UserError(
        f"DATA_PATH={self._path} was not made by scripts/prepare_data.py: {file} cannot be read"
        f" ({error})."
      ) from error

  @property
  def _files(self) -> list[str]:
    names = self._info["files"][self._split]
    return [str(file_io.absolute(self._path or "") / name) for name in names]

  @functools.cached_property
  def _records(self) -> Any:
    """The records of all epochs, concatenated."""
    import grain  # Takes 2 seconds, so only here.

    files: Any = grain.sources.ArrayRecordDataSource(self._files)
    records = cast(Any, grain.MapDataset.source(files))
    if self._shuffle:
      records = records.seed(self._seed % 2**32).shuffle()
    return records.repeat()


def write(
  folder: pathlib.Path,
  splits: Mapping[str, RowDataset],
  *,
  vocab_size: int,
  num_shards: int = 8,
  teacher: Mapping[str, Any] | None = None,
  progress: Callable[[int], object] = lambda num_rows: None,
):
  """Writes the first epoch of each data set as one split, which `PreparedRows` reads.

  Args:
    folder: An existing, empty folder.
    splits: Split -> data set; all of one `seq_len`.
    vocab_size: Exclusive upper bound of ids.
    num_shards: Files per split.
    teacher: What to record of the teacher whose predictions the sequences have.
    progress: Called with the number of sequences just written.

  Raises:
    UserError: A split is empty or endless.
    OSError: The folder cannot be written.
  """
  first = next(iter(splits.values()))
  tokenizer = first.tokenizer
  info: dict[str, Any] = {
    "seq_len": first.seq_len,
    "vocab_size": vocab_size,
    "tokenizer": None if tokenizer is None else tokenizer.fingerprint(),
    "fingerprint": [rows.fingerprint() for rows in splits.values()],
    "teacher": teacher,
    "columns": {},
    "splits": {},
    "files": {},
  }
  for split, rows in splits.items():
    count = rows.num_rows(0)
    if not count:
      raise UserError(f"{split}: {rows.named} has no sequence: one needs at least 2 tokens.")
    if count == ENDLESS:
      raise UserError(f"{split} is endless, such as a mixture: prepare each of its sources.")
    columns = _columns(rows, vocab_size)
    shards = min(num_shards, count)
    names = [f"{split}-{number:05d}-of-{shards:05d}.array_record" for number in range(shards)]
    bounds = [count * number // shards for number in range(shards + 1)]
    for number, name in enumerate(names):
      shard = range(bounds[number], bounds[number + 1])
      _write_shard(folder / name, rows, shard, columns, progress)
    info["columns"][split] = columns
    info["splits"][split], info["files"][split] = count, names
  (folder / INFO).write_text(json.dumps(info, indent=2) + "\n")


def _columns(rows: RowDataset, vocab_size: int) -> dict[str, tuple[Any, ...]]:
  """Returns array -> (dtype on disk, dtype in a batch, further dims)."""
  ids = "uint16" if vocab_size <= 2**16 else "uint32"
  places = "uint16" if rows.seq_len < 2**16 else "uint32"
  stored = {"weights": "uint8", "segments": places, "positions": places, TOP_K[1]: "float32"}
  arrays = rows.rows(0, np.array([0]))
  return {
    name: (stored.get(name, ids), str(array.dtype), *array.shape[2:])
    for name, array in arrays.items()
  }


def _write_shard(
  path: pathlib.Path,
  rows: RowDataset,
  numbers: range,
  columns: Mapping[str, tuple[Any, ...]],
  progress: Callable[[int], object],
):
  from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

  # One record per group: reading one does not decompress its neighbours.
  writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
  try:
    for first in range(0, len(numbers), _CHUNK):
      chunk = np.array(numbers[first : first + _CHUNK])
      arrays = rows.rows(0, chunk)
      stored = [arrays[name].astype(dtype) for name, (dtype, *_) in columns.items()]
      for name, small in zip(columns, stored, strict=True):
        assert (small == arrays[name]).all(), f"{name} does not fit {small.dtype}"
      for row in range(len(chunk)):
        writer.write(b"".join(array[row].tobytes() for array in stored))
      progress(len(chunk))
  finally:
    writer.close()
