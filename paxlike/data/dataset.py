# SPDX-License-Identifier: Apache-2.0
"""The interface of data sets: rows in an order fixed in advance, and batches cut from it.

The position in the data is (epoch, row): it says exactly what comes next, on any number of hosts.
"""

import abc
import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from paxlike import ranges
from paxlike.data.tokenizer import Tokenizer
from paxlike.errors import UserError

Arrays = dict[str, np.ndarray]
# The number of rows of an epoch that never ends.
ENDLESS = 2**62
# More than a batch has: a place beyond so many for each update is none that a run has reached.
_MOST_ROWS = 2**22
_PATIENCE = 10  # Seconds.


class Batch(NamedTuple):
  """One batch, or a host's rows of it.

  Attributes:
    arrays: int32 `inputs` and `targets`, float32 `weights`, and if packed int32 `segments` and
      `positions`; where targets have `alternatives`, those, int32; all [rows, T]. Of several
      sources, int32 `source` [rows, 1].
    state: Resumes after this batch; plain JSON.
    numbers: int64 [batch size], the number of every host's every row in the epoch, -1 where a row
      only fills up; None where nobody asks.
  """

  arrays: Arrays
  state: dict[str, Any]
  numbers: np.ndarray | None = None


class Dataset(abc.ABC):
  """A source of batches of rows of `seq_len` tokens.

  Attributes:
    seq_len: T.
    sources: The names of what it is made of, in the order in which `source` counts them; none if it
      is of one piece.
    is_endless: Whether an epoch never ends: it has `ENDLESS` rows.
    packed: Whether rows have `segments` and `positions`, that documents of one row do not see each
      other.
  """

  seq_len: ranges.Size
  sources: tuple[str, ...] = ()
  is_endless: bool = False
  packed: bool = False

  @property
  def tokenizer(self) -> Tokenizer | None:
    """Turns text into the ids, and back; None where there is no text."""
    return None

  @property
  def vocab_size(self) -> int | None:
    """The number that ids are below, as far as that was given; None: it was not."""
    return None

  @property
  def named(self) -> str:
    """What messages call it: where it is from, and which part of that it is."""
    return "the data"

  def check(self):  # noqa: B027 - a source without files has nothing to check.
    """Finds what is wrong, as far as that is cheap; writes nothing.

    Raises:
      UserError: A path is missing, say.
    """

  def no_rows(self) -> Arrays:
    """Returns what batches to train on have, [0, T] each; reads no data."""
    names = ("inputs", "targets", *(("segments", "positions") if self.packed else ()))
    arrays: Arrays = {name: np.zeros((0, self.seq_len), np.int32) for name in names}
    return arrays | {"weights": np.zeros((0, self.seq_len), np.float32)}

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Returns a text that is another for data of other content or order."""

  def batches(
    self,
    batch_size: int,
    *,
    rows: np.ndarray | None = None,
    state: dict[str, Any] | None = None,
    updates: int | None = None,
    repeat: bool = True,
    prefetch: int = 2,
  ) -> "Batches":
    """Returns an iterator of batches.

    Args:
      batch_size: Rows of a global batch.
      rows: The rows of each batch that this host loads, sorted, in [0, batch_size). None: all.
      state: Of the batch after which to go on; None: from the start.
      updates: How many batches led to `state`, if that is known.
      repeat: Whether to go on into the next epoch for ever, or to end after this one, the last
        batch filled up with rows without weight.
      prefetch: Batches prepared ahead, by a thread.

    Raises:
      UserError: `state` is of other data or no place in them, or there is no row.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    epoch, position = (0, 0) if state is None else self._place(state, updates, repeat)
    self._check_not_empty()
    return Batches(self._generate(batch_size, rows, epoch, position, repeat), prefetch=prefetch)

  def _place(self, state: Mapping[str, Any], updates: int | None, repeat: bool) -> tuple[int, int]:
    """Returns the epoch and row that a state names, if the data have them."""
    names = ("epoch", "position", "fingerprint")
    epoch, position, fingerprint = (state.get(name) for name in names)
    if isinstance(fingerprint, str) and fingerprint != self.fingerprint():
      raise UserError(
        "the checkpoint was made with other training data (or another tokenizer, packing, seed or"
        " MAX_SEQ_LEN), so it cannot go on where it was. Train with the old data, or take its"
        " weights into a new --job_log_dir."
      )
    most = 2**62 if updates is None else updates * _MOST_ROWS
    wrong = f"train_input of the checkpoint is damaged: {epoch=}, {position=} is no place in data"
    if not isinstance(fingerprint, str) or type(epoch) is not int or type(position) is not int:
      raise UserError(f"{wrong}.")
    if epoch < 0 or position < 0 or epoch > most or position > most:
      raise UserError(f"{wrong} after {updates} updates.")
    num_rows = self._num_rows_of(epoch)
    if repeat and num_rows is not None and position >= max(num_rows, 1):
      raise UserError(f"{wrong} of {num_rows} sequences.")
    return epoch, position

  def _num_rows_of(self, epoch: int) -> int | None:
    """Returns the number of rows of an epoch; None: a stream cannot tell."""
    del epoch
    return None

  def _check_not_empty(self):  # noqa: B027 - a stream cannot tell.
    """Raises UserError if there is no row."""

  @abc.abstractmethod
  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[Batch]:
    """Yields what `batches` promises, from row `position` of `epoch` on."""


class RowDataset(Dataset):
  """Rows that are found by (epoch, number), each without those before it."""

  @abc.abstractmethod
  def num_rows(self, epoch: int) -> int:
    """Returns the number of rows of an epoch."""

  @abc.abstractmethod
  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    """Returns the rows of these numbers, int64 [n] in [0, num_rows), as arrays [n, T]."""

  def _num_rows_of(self, epoch: int) -> int | None:
    return self.num_rows(epoch)

  def _check_not_empty(self):
    if self.num_rows(0) == 0:
      raise UserError(f"no sequence in {self.named}: that takes at least 2 tokens.")

  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[Batch]:
    fingerprint = self.fingerprint()
    while repeat or position < self.num_rows(epoch):
      numbers = position + rows
      parts, part_epoch = [], epoch
      while len(numbers):
        size = self.num_rows(part_epoch)
        here = numbers[numbers < size]
        if len(here):
          parts.append(self.rows(part_epoch, here))
        numbers = numbers[numbers >= size] - size
        if not repeat:
          parts += [_without_weight(self.rows(epoch, np.zeros(len(numbers), np.int64)))]
          break
        part_epoch += 1
      position += batch_size
      while repeat and position >= self.num_rows(epoch):
        position -= self.num_rows(epoch)
        epoch += 1
      arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
      yield Batch(arrays, {"epoch": epoch, "position": position, "fingerprint": fingerprint})


def _without_weight(arrays: Arrays) -> Arrays:
  return arrays | {"weights": np.zeros_like(arrays["weights"])}


class Batches(Iterator[Batch]):
  """Batches prepared ahead by a thread, which `close` ends."""

  def __init__(self, source: Iterator[Batch], *, prefetch: int):
    self._queue: queue.Queue[Batch | BaseException | None] = queue.Queue(max(prefetch, 1))
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
    self._thread.start()

  def __next__(self) -> Batch:
    item = self._queue.get()
    if isinstance(item, Batch):
      return item
    self._queue.put(item)
    if item is None:
      raise StopIteration
    raise item

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self.close()

  def close(self):
    """Ends the thread; there is no next batch then."""
    self._closed.set()
    self._drain()  # Lets a thread go on that waits for room.
    self._thread.join(_PATIENCE)  # It may be stuck, and ends with the process then.
    self._drain()
    self._queue.put(None)

  def _drain(self):
    while not self._queue.empty():
      self._queue.get_nowait()

  def _fill(self, source: Iterator[Batch]):
    last: BaseException | None = None
    try:
      for batch in source:
        if not self._put(batch):
          return
    except BaseException as error:  # Raised again where the batch is wanted.
      last = error
    self._put(last)

  def _put(self, item: Batch | BaseException | None) -> bool:
    while not self._closed.is_set():
      try:
        self._queue.put(item, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False
