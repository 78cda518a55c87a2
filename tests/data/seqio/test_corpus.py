# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from helpers.seqio_texts import TEXTS, bytes_of, register, register_texts
from helpers.sources import REPOSITORY

from paxlike.data.packing import PackedRows
from paxlike.data.seqio.corpus import SeqIOCorpus, SeqIOTask
from paxlike.errors import UserError


def register_misspelt():
  register_texts()
  return "textes"


def register_c4():
  """The C4 files beside the repository, as TFDS wrote them."""
  folder = REPOSITORY.parent / "shared" / "data"

  def dataset(split, shuffle_files, seed=None):
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(folder / "c4")
    return builder.as_dataset(split=split)

  source = {"splits": ("train", "validation")}
  return register("c4_files", lambda seqio: seqio.FunctionDataSource(dataset, **source))


def corpus(register=register_texts, **options):
  defaults = {"split": "train", "vocab_size": 300}
  return SeqIOCorpus(task=SeqIOTask(register), **(defaults | options))


@pytest.mark.slow
def test_a_task_is_read_once_into_its_tokens():
  tokens, offsets, _ = corpus().index()
  assert len(offsets) == len(TEXTS) + 1
  for text, first, last in zip(TEXTS, offsets[:-1], offsets[1:], strict=True):
    np.testing.assert_array_equal(tokens[first:last], bytes_of(text))
  code = (
    "import sys\n"
    "for name in ('tensorflow', 'seqio', 'tensorflow_datasets'): sys.modules[name] = None\n"
    "from data.seqio.test_corpus import corpus\n"
    "print(len(corpus().index().tokens))"
  )
  folders = [str(REPOSITORY / "tests"), str(REPOSITORY)]
  command = [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}\n{code}"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) == len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"register": register_misspelt}, "no SeqIO task or mixture textes. Did you mean texts?"),
    ({"split": "test"}, "has no split test"),
    ({"vocab_size": 100}, "VOCAB_SIZE=100"),
  ],
)
def test_mistakes_are_named(options, says):
  with pytest.raises(UserError) as error:
    corpus(**options).index()
  assert says in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.slow
def test_c4_files_of_tfds_are_read(shared_data):
  data = PackedRows(corpus=corpus(register_c4, split="validation"), seq_len=128, shuffle=False)
  tokens, offsets, _ = data.corpus.index()
  assert len(offsets) == 201
  with data.batches(8) as batches:
    arrays = next(batches).arrays
  assert arrays["inputs"].shape == (8, 128)
  assert arrays["weights"].mean() > 0.9
  text = bytes(int(i) - 3 for i in tokens[: offsets[1]]).decode()
  assert len(text) > 100
