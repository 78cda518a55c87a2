# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from helpers.seqio_texts import TEXTS, bytes_of, register_texts

from paxlike.data.seqio.corpus import SeqIOTask
from paxlike.data.seqio.stream import SeqIOStream


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore")  # TensorFlow's, SeqIO's and TFDS's own.
def test_a_stream_resumes_exactly_and_says_what_the_texts_say(packed):
  def stream():
    return SeqIOStream(
      task=SeqIOTask(register_texts),
      task_split="train",
      seq_len=32,
      vocab_size=300,
      seed=1,
      packed=packed,
    )

  with stream().batches(4, repeat=False) as batches:
    whole = list(batches)
  seen = np.concatenate([b.arrays["targets"][b.arrays["weights"] > 0] for b in whole])
  if packed:
    expected = np.concatenate([bytes_of(text)[:32] for text in TEXTS])
    assert np.array_equal(np.sort(seen), np.sort(expected))
    assert {b.arrays["segments"].max() for b in whole} != {1}
  with stream().batches(4, state=whole[1].state, repeat=False) as batches:
    for expected, got in zip(whole[2:], batches, strict=True):
      assert got.state == expected.state
      for name, value in expected.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], value, err_msg=name)
  with stream().batches(4, rows=np.array([1, 3]), repeat=False) as batches:
    part = next(batches).arrays
  for name, value in whole[0].arrays.items():
    np.testing.assert_array_equal(part[name], value[[1, 3]])
