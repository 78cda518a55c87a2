# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from helpers.rows import assert_described

from paxlike.data.synthetic import ConstantTokens, RandomTokens


def make(seed: int = 0, *, seq_len: int = 64, vocab_size: int = 50) -> RandomTokens:
  return RandomTokens(seq_len=seq_len, vocab_size=vocab_size, seed=seed)


@pytest.mark.parametrize("dataset", [make(), ConstantTokens(seq_len=64)])
def test_batches_have_the_common_form(dataset):
  assert_described(dataset)
  with dataset.batches(3) as batches:
    arrays = next(batches).arrays
  expected = {"inputs": np.int32, "targets": np.int32, "weights": np.float32}
  assert {name: array.dtype for name, array in arrays.items()} == expected
  assert all(array.shape == (3, 64) for array in arrays.values())
  np.testing.assert_array_equal(arrays["inputs"][:, 1:], arrays["targets"][:, :-1])
  assert (arrays["weights"] == 1).all()


def test_random_tokens_are_uniform():
  inputs = make(seq_len=1000).rows(0, np.arange(100))["inputs"]
  counts = np.bincount(inputs.ravel(), minlength=50)
  assert len(counts) == 50
  chi_squared = ((counts - 2000) ** 2 / 2000).sum()
  assert 20 < chi_squared < 90  # 49 degrees of freedom: outside once in 5,000.


def test_random_rows_differ_by_number_epoch_and_seed():
  numbers = np.array([0, 1, 2**39])
  rows = [make().rows(0, numbers), make().rows(1, numbers), make(1).rows(0, numbers)]
  rows.append(make(-1).rows(0, numbers))
  found = {row.tobytes() for arrays in rows for row in arrays["inputs"]}
  assert len(found) == 12


def test_any_random_row_is_made_without_those_before_it():
  whole = make().rows(0, np.arange(20))
  picked = make().rows(0, np.array([17, 3]))
  for name, array in picked.items():
    np.testing.assert_array_equal(array, whole[name][[17, 3]])


def test_resume_is_exact():
  with make().batches(4) as batches:
    whole = [next(batches) for _ in range(6)]
  for done in range(1, 6):
    with make().batches(4, state=whole[done - 1].state) as batches:
      for batch in whole[done:]:
        np.testing.assert_array_equal(next(batches).arrays["inputs"], batch.arrays["inputs"])


def test_constant_tokens_are_one():
  arrays = ConstantTokens(seq_len=4).rows(0, np.arange(2))
  assert (arrays["inputs"] == 1).all() and (arrays["targets"] == 1).all()


def test_fingerprints_differ():
  datasets = [make(), make(1), make(seq_len=8), make(vocab_size=51), ConstantTokens(seq_len=64)]
  assert len({dataset.fingerprint() for dataset in datasets}) == 5
