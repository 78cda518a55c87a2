# SPDX-License-Identifier: Apache-2.0
"""A law of data sets."""

import numpy as np

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
