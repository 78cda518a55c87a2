# SPDX-License-Identifier: Apache-2.0
"""Rows of whole examples, against the examples themselves."""

import numpy as np
import pytest
from helpers.rows import assert_described

from paxlike.data.corpus import Corpus
from paxlike.data.examples import ExampleRows
from paxlike.data.token_index import TokenIndex
from paxlike.errors import UserError

SEQ_LEN = 12
LENGTHS = [5, 2, 13, 1, 7, 30, 0, 3, 3, 9, 12, 4]


class Examples(Corpus):
  """Examples of distinct tokens from 1 on; the later half of each is what counts."""

  def __init__(self, lengths):
    self.lengths = lengths

  def index(self) -> TokenIndex:
    offsets = np.cumsum([0, *self.lengths], dtype=np.int64)
    tokens = 1 + np.arange(offsets[-1]).astype(np.uint16)
    weights = [np.arange(length) >= length // 2 for length in self.lengths]
    columns = {
      "weights": np.concatenate([np.zeros(0), *weights]).astype(np.uint8),
      "alternatives": tokens + 1000,
    }
    return TokenIndex(tokens, offsets, columns)


def make(lengths=LENGTHS, **options):
  defaults = {"corpus": Examples(lengths), "seq_len": SEQ_LEN, "packed": False}
  return ExampleRows(**(defaults | options))


def expected(number, lengths=LENGTHS):
  """Returns (inputs, targets, weights, alternatives) of one example."""
  tokens, offsets, columns = Examples(lengths).index()
  part = slice(offsets[number], offsets[number + 1])
  ids, weights, others = tokens[part], columns["weights"][part], columns["alternatives"][part]
  found = ids[:-1], ids[1:], weights[1:], others[1:]
  return tuple(values[:SEQ_LEN].tolist() for values in found)


def examples_in(arrays):
  """Returns what `expected` would, of every example in some rows, told apart by their segments."""
  found = []
  for row, inputs in enumerate(arrays["inputs"]):
    segments = arrays["segments"][row] if "segments" in arrays else inputs > 0
    for segment in range(1, int(segments.max(initial=0)) + 1):
      at = np.flatnonzero(segments == segment)
      assert (np.diff(at) == 1).all()
      if "positions" in arrays:
        assert arrays["positions"][row][at].tolist() == list(range(len(at)))
      names = ("inputs", "targets", "weights", "alternatives")
      found.append(tuple(arrays[name][row][at].tolist() for name in names))
    assert arrays["weights"][row][segments == 0].sum() == 0
  return found


ALL = sorted(expected(number) for number, length in enumerate(LENGTHS) if length > 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_example_once(packed, shuffle):
  data = make(packed=packed, shuffle=shuffle)
  assert_described(data)
  for epoch in (0, 1):
    assert sorted(examples_in(data.rows(epoch, np.arange(data.num_rows(epoch))))) == ALL
  first, second = (data.rows(e, np.arange(5))["inputs"].tolist() for e in (0, 1))
  assert (first == second) is not shuffle


def test_packing_leaves_little_room():
  random = np.random.default_rng(0)
  lengths = random.integers(2, 60, 3000).tolist()
  data = make(lengths, packed=True, seq_len=100)
  rows = data.rows(0, np.arange(data.num_rows(0)))
  filled = (rows["segments"] > 0).mean()
  assert filled > 0.97
  assert (rows["segments"] > 0).sum() == sum(length - 1 for length in lengths)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_one_pass_has_every_example_once_in_short_batches(packed, batch_size):
  data = make(packed=packed, shuffle=False, seq_len=200)
  with data.batches(batch_size, repeat=False) as batches:
    passed = list(batches)
  found, numbers = [], []
  for batch in passed:
    assert batch.numbers is not None and len(batch.numbers) == batch_size
    real = batch.numbers >= 0
    assert batch.arrays["weights"][~real].sum() == 0
    found += examples_in({name: value[real] for name, value in batch.arrays.items()})
    numbers += batch.numbers[real].tolist()
  whole = make(packed=packed, shuffle=False, seq_len=200)
  every = whole.rows(0, np.arange(whole.num_rows(0)))
  assert sorted(found) == sorted(examples_in(every))
  assert sorted(numbers) == list(range(whole.num_rows(0)))


def test_lengths_of_batches_follow_their_longest_row():
  lengths = [2 ** (i % 9) + 2 for i in range(60)]
  with make(lengths, seq_len=256).batches(8, repeat=False) as batches:
    seen = [batch.arrays["inputs"].shape[1] for batch in batches]
  assert seen == sorted(seen, reverse=True)
  assert set(seen) <= {64, 96, 128, 192, 256}
  assert seen[0] == 256 and seen[-1] == 64


@pytest.mark.parametrize("repeat", [False, True])
def test_hosts_share_the_rows_out(repeat):
  with make(seed=3).batches(4, repeat=repeat) as batches:
    whole = [next(batches) for _ in range(3)]
  for rows in ([0, 1], [1, 3]):
    with make(seed=3).batches(4, rows=np.array(rows), repeat=repeat) as batches:
      for expected_batch in whole:
        batch = next(batches)
        assert batch.state == expected_batch.state
        for name, value in expected_batch.arrays.items():
          np.testing.assert_array_equal(batch.arrays[name], value[rows])


def test_training_resumes_after_any_batch():
  with make(seed=3, packed=True).batches(2) as batches:
    whole = [next(batches) for _ in range(9)]
  for stop in (0, 3, 7):
    with make(seed=3, packed=True).batches(2, state=whole[stop].state) as batches:
      np.testing.assert_array_equal(
        next(batches).arrays["inputs"], whole[stop + 1].arrays["inputs"]
      )


@pytest.mark.parametrize("lengths", [[], [0, 1, 1]])
def test_no_example_is_said(lengths):
  with pytest.raises(UserError, match="no example"):
    make(lengths).batches(1)


def test_examples_without_loss_are_counted_and_an_error_if_there_are_no_others(capsys):
  make([9, 30, 14]).batches(1).close()
  assert "2 of 3 examples are truncated to 12 tokens" in capsys.readouterr().err
  assert make([9, 30, 14]).truncated == (2, 1)
  with pytest.raises(UserError, match="MAX_SEQ_LEN=12 truncates all 2 examples"):
    make([30, 40]).batches(1)
