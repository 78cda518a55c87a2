# SPDX-License-Identifier: Apache-2.0
"""Batches on their way to the devices."""

import jax
import numpy as np
import pytest

from paxlike.devices.batch_placement import BatchPlacer
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError


@pytest.fixture
def devices():
  return MeshSpec(ici=(2, 1, 1)).build(jax.devices()[:2])


def test_what_is_abstract_is_what_is_put(devices):
  placer = BatchPlacer(devices, batch_size=4, seq_len=8)
  arrays = {"inputs": np.ones((4, 8), np.int32), "source": np.ones((4, 1), np.int32)}
  put = placer.put(arrays)
  for name, told in placer.abstract({name: array[:0] for name, array in arrays.items()}).items():
    there = put[name]
    assert (told.shape, told.dtype, told.sharding) == (there.shape, there.dtype, there.sharding)


def test_rows_of_too_many_segments_are_refused(devices):
  segments = np.array([[1, 1, 1, 0], [1, 2, 3, 0]], np.int32)
  assert BatchPlacer(devices, batch_size=2, seq_len=4, max_segments=4).put({"segments": segments})
  with pytest.raises(UserError, match="has 4 documents, but MAX_SEGMENTS_PER_ROW=3"):
    BatchPlacer(devices, batch_size=2, seq_len=4, max_segments=3).put({"segments": segments})
