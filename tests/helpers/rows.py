# SPDX-License-Identifier: Apache-2.0
"""A law of data sets."""

import numpy as np

from helpers.tiny_model import SEQ_LEN, VOCAB
from paxlike.data.dataset import Arrays, RowDataset


def assert_described(dataset: RowDataset):
  """What a data set says of its rows without reading them is true."""

  def kinds(arrays: Arrays):
    return {name: (array.dtype, array.shape[1:]) for name, array in arrays.items()}

  none = dataset.no_rows()
  assert all(len(array) == 0 for array in none.values())
  found = kinds(dataset.rows(0, np.array([0])))
  found.pop("alternatives", None)  # No training reads them.
  assert kinds(none) == found


class Rows(RowDataset):
  """Thirteen rows: a multiple of no batch size."""

  seq_len = SEQ_LEN

  def fingerprint(self):
    return "thirteen"

  def num_rows(self, epoch):
    return 13

  def rows(self, epoch, numbers):
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (13, SEQ_LEN + 1)).astype(np.int32)[numbers]
    weights = random.random((13, SEQ_LEN)).astype(np.float32)[numbers]
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
