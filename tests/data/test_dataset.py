# SPDX-License-Identifier: Apache-2.0
"""The position in the data: exact after any step, on any number of hosts."""

import importlib
import inspect
import json
import pkgutil
import threading

import numpy as np
import pytest

import paxlike.data
from paxlike.data.dataset import Arrays, Batch, Batches, RowDataset
from paxlike.errors import UserError


class Numbered(RowDataset):
  """Rows that hold their epoch and number; epochs differ in length."""

  seq_len = 2

  def __init__(self, *, num_rows: int = 7, text: str = "numbered"):
    self._num_rows = num_rows
    self._text = text

  def fingerprint(self) -> str:
    return self._text

  def num_rows(self, epoch: int) -> int:
    return self._num_rows + epoch % 2

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    assert ((numbers >= 0) & (numbers < self.num_rows(epoch))).all()
    inputs = np.stack([np.full(len(numbers), epoch), numbers], 1).astype(np.int32)
    weights = np.ones(inputs.shape, np.float32)
    return {"inputs": inputs, "targets": inputs + 1, "weights": weights}


def take(dataset: RowDataset, count: int, *args, **options) -> list[Batch]:
  with dataset.batches(*args, **options) as batches:
    return [next(batches) for _ in range(count)]


def rows_of(batches: list[Batch]) -> list[tuple[int, ...]]:
  """The rows in their order, those without weight left out."""
  return [
    tuple(row)
    for batch in batches
    for row, weights in zip(batch.arrays["inputs"].tolist(), batch.arrays["weights"], strict=True)
    if weights.any()
  ]


def assert_equal(one: list[Batch], other: list[Batch]):
  assert [batch.state for batch in one] == [batch.state for batch in other]
  for left, right in zip(one, other, strict=True):
    assert left.arrays.keys() == right.arrays.keys()
    for name, array in left.arrays.items():
      assert array.dtype == right.arrays[name].dtype
      np.testing.assert_array_equal(array, right.arrays[name])


def test_data_that_never_end_are_known_before_they_are_read():
  for module in pkgutil.iter_modules(paxlike.data.__path__, "paxlike.data."):
    importlib.import_module(module.name)
  kinds = [kind for kind in RowDataset.__subclasses__() if kind.__module__.startswith("paxlike.")]
  endless = {kind for kind in kinds if "ENDLESS" in inspect.getsource(kind.num_rows)}
  assert endless == {kind for kind in kinds if kind.is_endless} != set()


def test_batches_are_the_rows_in_order_through_all_epochs():
  expected = [(epoch, row) for epoch in range(4) for row in range(7 + epoch % 2)]
  assert rows_of(take(Numbered(), 10, 3)) == expected[:30]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])  # 20: more than two epochs at once.
def test_resuming_after_any_batch_changes_nothing(batch_size):
  whole = take(Numbered(), 12, batch_size)
  assert whole[-1].state["epoch"] > 0
  for done in range(1, 12):
    state = json.loads(json.dumps(whole[done - 1].state))
    assert_equal(take(Numbered(), 12 - done, batch_size, state=state), whole[done:])


@pytest.mark.parametrize("num_hosts", [2, 3, 4])
@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("num_rows", [13, 45])
def test_hosts_together_load_what_one_would(num_hosts, repeat, num_rows):
  data = Numbered(num_rows=num_rows)
  count = 9 if repeat else -(-num_rows // 8)
  alone = take(data, count, 8, repeat=repeat)
  parts = np.array_split(np.random.default_rng(0).permutation(8), num_hosts)
  hosts = [np.sort(part) for part in parts]
  loaded = [take(data, count, 8, rows=rows, repeat=repeat) for rows in hosts]
  for step, batch in enumerate(alone):
    for name, array in batch.arrays.items():
      together = np.empty_like(array)
      for rows, batches in zip(hosts, loaded, strict=True):
        assert batches[step].state == batch.state
        together[rows] = batches[step].arrays[name]
      np.testing.assert_array_equal(together, array)


@pytest.mark.parametrize(
  ("quick_seconds", "width", "sizes"),
  [(60, 2, [3, 12, 9]), (60, 2**17, [3, 6, 6]), (60, 2**20, [3, 3, 3]), (0, 2, [3, 3, 3])],
)
def test_small_batches_that_are_made_quickly_are_made_together(
  monkeypatch, quick_seconds, width, sizes
):
  monkeypatch.setattr("paxlike.data.dataset.QUICK_SECONDS", quick_seconds)
  made = []

  class Counted(Numbered):
    def rows(self, epoch, numbers):
      made.append(len(numbers))
      return super().rows(epoch, numbers) | {"wide": np.zeros((len(numbers), width), np.int32)}

  assert rows_of(take(Counted(num_rows=27), 9, 3)) == [(0, row) for row in range(27)]
  assert made[:3] == sizes


def test_a_passing_error_of_several_batches_is_none():
  class Passing(Numbered):
    def rows(self, epoch, numbers):
      if len(numbers) > 6:
        raise OSError("not now")
      return super().rows(epoch, numbers)

  assert rows_of(take(Passing(num_rows=27), 9, 3)) == [(0, row) for row in range(27)]


def test_another_batch_size_and_number_of_hosts_go_on_at_the_same_row():
  before = take(Numbered(), 5, 4)
  hosts = [
    take(Numbered(), 4, 6, rows=rows, state=before[-1].state)
    for rows in (np.arange(3), np.arange(3, 6))
  ]
  after = [row for step in zip(*hosts, strict=True) for row in rows_of(list(step))]
  assert rows_of(before) + after == rows_of(take(Numbered(), 44, 1))


@pytest.mark.parametrize("num_rows", [1, 4, 7, 8, 9])
def test_one_pass_has_every_row_once_and_ends_with_rows_without_weight(num_rows):
  with Numbered(num_rows=num_rows).batches(4, repeat=False) as batches:
    found = list(batches)
    assert list(batches) == []  # And it stays at its end.
  assert rows_of(found) == [(0, row) for row in range(num_rows)]
  assert len(found) == -(-num_rows // 4)
  for batch in found:
    assert {len(array) for array in batch.arrays.values()} == {4}


def test_every_host_sees_as_many_batches_of_one_pass():
  for rows in ([0, 1], [2, 3]):
    with Numbered(num_rows=5).batches(4, rows=np.array(rows), repeat=False) as batches:
      found = list(batches)
    assert [len(batch.arrays["inputs"]) for batch in found] == [2, 2]
  assert not found[1].arrays["weights"].any()  # The second host's last batch has no row at all.


def test_resuming_one_pass_changes_nothing():
  dataset = Numbered(num_rows=10)
  with dataset.batches(4, repeat=False) as batches:
    whole = list(batches)
  for done in range(1, len(whole) + 1):
    with dataset.batches(4, repeat=False, state=whole[done - 1].state) as batches:
      assert_equal(list(batches), whole[done:])


def test_state_of_other_data_is_refused():
  state = take(Numbered(), 1, 2)[0].state
  with pytest.raises(UserError, match=r"other training data.*--job_log_dir"):
    Numbered(text="other").batches(2, state=state)


@pytest.mark.parametrize("repeat", [True, False])
def test_data_shorter_than_a_row_are_refused(repeat):
  with pytest.raises(UserError, match="the data has no sequence: one needs at least 2 tokens"):
    Numbered(num_rows=0).batches(2, repeat=repeat)


def test_errors_of_the_thread_are_raised_where_the_batch_is_wanted():
  class Broken(Numbered):
    def rows(self, epoch, numbers):
      if 4 in numbers:
        raise UserError("row 4 is broken")
      return super().rows(epoch, numbers)

  with Broken().batches(2) as batches:
    assert rows_of([next(batches), next(batches)]) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    for _ in range(2):
      with pytest.raises(UserError, match="row 4 is broken"):
        next(batches)


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("taken", [0, 1, 3])
def test_close_ends_the_thread_and_the_batches(prefetch, taken):
  before = threading.active_count()
  batches = Numbered().batches(2, prefetch=prefetch)
  for _ in range(taken):
    next(batches)
  assert threading.active_count() == before + 1
  batches.close()
  assert threading.active_count() == before
  assert list(batches) == []
  batches.close()


def test_no_more_is_prepared_than_asked_for():
  prepared = 0
  full = threading.Event()

  def source():
    nonlocal prepared
    while True:
      prepared += 1
      if prepared == 5:
        full.set()
      yield [Batch({}, {})]

  with Batches(source(), prefetch=3) as batches:
    next(batches)
    assert full.wait(10)  # 1 taken, 3 in the queue, 1 in the thread's hand.
    assert prepared == 5
