# SPDX-License-Identifier: Apache-2.0
"""The interface of data sets: sequences in a deterministic order, grouped into batches.

The position (epoch, index of the next sequence) determines all later batches, on any number of
hosts.
"""

import abc
import collections
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from paxlike.config import ranges
from paxlike.data.source import Source
from paxlike.errors import RunError, UserError

Arrays = dict[str, np.ndarray]
# `num_rows` of an epoch that never ends.
ENDLESS = 2**62
# An upper bound of the batch size: a larger position per update means a damaged checkpoint.
_MAX_BATCH_SIZE = 2**22
_JOIN_SECONDS = 10
# Up to so many batches, of so many bytes in all, are made by one call and handed over together, if
# one takes less time than QUICK_SECONDS: for each on its own, to call NumPy's functions and to wake
# the consumer would take half of the time.
_TOGETHER, _BYTES_TOGETHER, QUICK_SECONDS = 4, 2**22, 0.01


class Batch(NamedTuple):
  """One global batch, or a host's share of it.

  Attributes:
    arrays: [B, T]: int32 `inputs` and `targets`, float32 loss `weights`; if packed, int32
      `segments` and `positions`; if the data has them, int32 `alternatives` (wrong answers). In a
      mixture also int32 `source` [B, 1].
    state: The position after this batch, from which `Dataset.batches` resumes; plain JSON.
    numbers: int64 [batch size], the index in the epoch of each sequence of the global batch, -1 for
      padding; None unless sequences are reordered.
  """

  arrays: Arrays
  state: dict[str, Any]
  numbers: np.ndarray | None = None


class Dataset(Source, abc.ABC):
  """A source of batches of sequences of `seq_len` tokens.

  Attributes:
    seq_len: T.
    sources: Names of a mixture's sources, in the order of the ids in `source`; else empty.
    is_endless: Whether an epoch never ends: it has `ENDLESS` sequences.
    packed: Whether sequences have `segments` and `positions`, so that attention does not cross
      documents.
    segment_names: Names of the segments of each sequence, if they have fixed roles.
  """

  seq_len: ranges.Size
  sources: tuple[str, ...] = ()
  is_endless: bool = False
  packed: bool = False
  segment_names: tuple[str, ...] = ()

  def no_rows(self) -> Arrays:
    """Returns an empty training batch, arrays [0, T]; reads no data."""
    names = ("inputs", "targets", *(("segments", "positions") if self.packed else ()))
    arrays: Arrays = {name: np.zeros((0, self.seq_len), np.int32) for name in names}
    return arrays | {"weights": np.zeros((0, self.seq_len), np.float32)}

  @abc.abstractmethod
  def fingerprint(self) -> str:
    """Returns an identifier that changes with the content and the order of the data."""

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
      batch_size: Sequences of a global batch.
      rows: Indices in each global batch that this host loads, sorted, in [0, batch_size). None:
        all.
      state: `state` of the batch to resume after; None: from the start.
      updates: Number of batches up to `state`, if known; a position that they cannot reach is an
        error.
      repeat: Whether to repeat epochs for ever. Else the iterator ends with this epoch, and the
        last batch is padded with sequences of weight 0.
      prefetch: Batches, or groups of up to four small ones, that wait in a queue; a thread prepares
        the next one meanwhile.

    Raises:
      UserError: `state` is of other data or damaged, or the data is empty.
    """
    rows = np.arange(batch_size) if rows is None else np.asarray(rows)
    epoch, position = (0, 0) if state is None else self._place(state, updates, repeat)
    self._check_not_empty()
    return Batches(self._generate(batch_size, rows, epoch, position, repeat), prefetch=prefetch)

  def _place(self, state: Mapping[str, Any], updates: int | None, repeat: bool) -> tuple[int, int]:
    """Returns the (epoch, position) of a state, after checking both."""
    names = ("epoch", "position", "fingerprint")
    epoch, position, fingerprint = (state.get(name) for name in names)
    if isinstance(fingerprint, str) and fingerprint != self.fingerprint():
      raise UserError(
        "the checkpoint was made with other training data (or another tokenizer, packing, seed or"
        " MAX_SEQ_LEN), so its data position is not valid here. Resume with the old data, or start"
        " from its weights in a new --job_log_dir (--fdl.CHECKPOINT_RESTORE_PATH)."
      )
    most = 2**62 if updates is None else updates * _MAX_BATCH_SIZE
    wrong = f"train_input of the checkpoint is damaged: {epoch=}, {position=} is not a position"
    if not isinstance(fingerprint, str) or type(epoch) is not int or type(position) is not int:
      raise UserError(f"{wrong}.")
    if epoch < 0 or position < 0 or epoch > most or position > most:
      raise UserError(f"{wrong} that {updates} updates can reach.")
    num_rows = self._num_rows_of(epoch)
    if repeat and num_rows is not None and position >= max(num_rows, 1):
      raise UserError(f"{wrong} in {num_rows} sequences.")
    return epoch, position

  def _num_rows_of(self, epoch: int) -> int | None:
    """Returns the number of sequences of an epoch; None if unknown, as of a stream."""
    del epoch
    return None

  @property
  def epoch_rows(self) -> int | None:
    """The number of sequences of the first epoch; None if it is endless or not known."""
    found = self._num_rows_of(0)
    return None if found is None or found >= ENDLESS else found

  @property
  def truncated(self) -> tuple[int, int] | None:
    """How many examples are truncated, and how many of them keep no loss; None: not known."""
    return None

  def _check_not_empty(self):  # A stream does not know its length.
    """Raises UserError if there is no sequence."""

  @abc.abstractmethod
  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[list[Batch]]:
    """Yields the batches of `batches`, starting at sequence `position` of `epoch`.

    Each list holds one or more consecutive batches.
    """


def epoch_random(seed: int, epoch: int) -> np.random.Generator:
  """Returns the random numbers that order an epoch."""
  return np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[0, 0, 0, epoch]))


class RowDataset(Dataset):
  """Sequences with random access by (epoch, index)."""

  @abc.abstractmethod
  def num_rows(self, epoch: int) -> int:
    """Returns the number of sequences of an epoch."""

  @abc.abstractmethod
  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    """Returns the sequences at `numbers`, int64 [n] in [0, num_rows), as new arrays [n, T]."""

  def _num_rows_of(self, epoch: int) -> int | None:
    return self.num_rows(epoch)

  def _check_not_empty(self):
    if self.num_rows(0) == 0:
      raise UserError(f"{self.named} has no sequence: one needs at least 2 tokens.")

  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[list[Batch]]:
    place = _Place(self, epoch, position, batch_size, repeat)
    most = 1  # Batches that one call makes.
    while repeat or place.remaining > 0:
      count = max(1, min(most, (place.remaining - 1) // batch_size))  # None of them ends the epoch.
      began = time.perf_counter()
      try:
        if count == 1:
          arrays = self._across_epochs(place.epoch, place.position + rows, repeat)
        else:
          begins = place.position + batch_size * np.arange(count)
          arrays = self.rows(place.epoch, (begins[:, None] + rows).reshape(-1))
      except (UserError, RunError, OSError):
        if most <= 1:
          raise
        most = 1  # Batch by batch, so that only the faulty one raises.
        continue
      is_quick = time.perf_counter() - began < QUICK_SECONDS * count
      size = sum(x.nbytes for x in arrays.values()) // count
      most = min(_TOGETHER, _BYTES_TOGETHER // max(size, 1)) if is_quick else 1
      yield [Batch(part, place.after_batch()) for part in _parts(arrays, count)]

  def _across_epochs(self, epoch: int, numbers: np.ndarray, repeat: bool) -> Arrays:
    """Returns sequences of a batch whose `numbers` go on into the next epochs.

    Unless `repeat`, those are padding: sequences of weight 0.
    """
    parts = []
    while len(numbers):
      size = self.num_rows(epoch)
      here = numbers[numbers < size]
      if len(here):
        parts.append(self.rows(epoch, here))
      numbers = numbers[numbers >= size] - size
      if not repeat:
        parts += [_without_weight(self.rows(epoch, np.zeros(len(numbers), np.int64)))]
        break
      epoch += 1
    return _concatenated(parts)


class _Place:
  """Where in the epochs of a dataset a stream of batches is."""

  def __init__(self, dataset: RowDataset, epoch: int, position: int, batch_size: int, repeat: bool):
    self.epoch = epoch
    self.position = position
    self._dataset = dataset
    self._fingerprint = dataset.fingerprint()
    self._batch_size = batch_size
    self._repeat = repeat

  @property
  def remaining(self) -> int:
    """The number of sequences until the epoch ends."""
    return self._dataset.num_rows(self.epoch) - self.position

  def after_batch(self) -> dict[str, Any]:
    """Goes on by a batch, and returns the state from which the stream continues after it."""
    self.position += self._batch_size
    while self._repeat and self.remaining <= 0:
      self.position = -self.remaining
      self.epoch += 1
    return {"epoch": self.epoch, "position": self.position, "fingerprint": self._fingerprint}


def _parts(arrays: Arrays, count: int) -> Iterator[Arrays]:
  """Yields `count` parts of equal length of all arrays."""
  length = len(next(iter(arrays.values()))) // count
  for n in range(count):
    yield {name: x[n * length : (n + 1) * length] for name, x in arrays.items()}


def _concatenated(parts: list[Arrays]) -> Arrays:
  if len(parts) == 1:
    return parts[0]
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _without_weight(arrays: Arrays) -> Arrays:
  return arrays | {"weights": np.zeros_like(arrays["weights"])}


class Batches(Iterator[Batch]):
  """Batches prefetched by a thread; `close` stops it."""

  def __init__(self, source: Iterator[list[Batch]], *, prefetch: int):
    """Starts the thread, which keeps up to `prefetch` of the source's lists in a queue."""
    self._queue: queue.Queue[list[Batch] | BaseException | None] = queue.Queue(max(prefetch, 1))
    self._ready: collections.deque[Batch] = collections.deque()
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
    self._thread.start()

  def __next__(self) -> Batch:
    if self._ready:
      return self._ready.popleft()
    item = self._queue.get()
    if isinstance(item, list):
      self._ready.extend(item)
      return self._ready.popleft()
    self._queue.put(item)
    if item is None:
      raise StopIteration
    raise item

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self.close()

  def close(self):
    """Ends the thread; the iterator is exhausted then."""
    self._closed.set()
    self._drain()  # Unblocks a thread that waits for space in the queue.
    self._thread.join(_JOIN_SECONDS)  # A thread that hangs ends with the process (daemon).
    self._drain()
    self._ready.clear()
    self._queue.put(None)

  def _drain(self):
    while not self._queue.empty():
      self._queue.get_nowait()

  def _fill(self, source: Iterator[list[Batch]]):
    last: BaseException | None = None
    try:
      for batches in source:
        self._put(batches)
        if self._closed.is_set():
          return
    except BaseException as error:  # Raised again by `__next__`.
      last = error
    self._put(last)

  def _put(self, item: list[Batch] | BaseException | None):
    if not self._closed.is_set():
      self._queue.put(item)  # If `close` comes while this waits, it drains the queue.
