# SPDX-License-Identifier: Apache-2.0
import functools
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from paxlike.data.seqio_data import SeqIOStream, SeqIOTask
from paxlike.errors import UserError

TEXTS = [f"document {i}: {'la ' * (i % 7)}end" for i in range(40)]


def _register(name, source):
  import seqio

  if name not in seqio.TaskRegistry.names():
    seqio.TaskRegistry.add(
      name,
      source=source(seqio),
      preprocessors=[
        functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
        seqio.preprocessors.tokenize,
      ],
      output_features={"targets": seqio.Feature(seqio.ByteVocabulary(), add_eos=False)},
    )
  return name


def register_texts():
  """A task of forty short texts, as bytes."""

  def dataset(split, shuffle_files, seed=None):
    import tensorflow as tf

    texts: Any = {"text": TEXTS}
    return tf.data.Dataset.from_tensor_slices(texts)

  return _register("texts", lambda seqio: seqio.FunctionDataSource(dataset, splits=("train",)))


def register_misspelt():
  register_texts()
  return "textes"


def register_c4():
  """The C4 files beside the repository, as TFDS wrote them."""
  folder = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"

  def dataset(split, shuffle_files, seed=None):
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(folder / "c4")
    return builder.as_dataset(split=split)

  source = {"splits": ("train", "validation")}
  return _register("c4_files", lambda seqio: seqio.FunctionDataSource(dataset, **source))


def task(register=register_texts, **options):
  defaults = {"task_split": "train", "vocab_size": 300, "seq_len": 32, "shuffle": False}
  return SeqIOTask(register=register, **(defaults | options))


def bytes_of(text):
  return np.frombuffer(text.encode(), np.uint8) + 3  # seqio.ByteVocabulary's special ids.


@pytest.mark.slow
def test_a_task_is_read_once_into_its_tokens():
  tokens, offsets = task().index()
  assert len(offsets) == len(TEXTS) + 1
  for text, first, last in zip(TEXTS, offsets[:-1], offsets[1:], strict=True):
    np.testing.assert_array_equal(tokens[first:last], bytes_of(text))
  code = (
    "import sys\n"
    "for name in ('tensorflow', 'seqio', 'tensorflow_datasets'): sys.modules[name] = None\n"
    "from test_seqio_data import task\n"
    "print(len(task().index().tokens))"
  )
  folders = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])]
  command = [sys.executable, "-c", f"import sys; sys.path[:0] = {folders}\n{code}"]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert int(done.stdout) == len(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("options", "says"),
  [
    ({"register": register_misspelt}, "no SeqIO task or mixture textes. Did you mean texts?"),
    ({"task_split": "test"}, "has no split test"),
    ({"feature": "target"}, "has no feature target"),
    ({"vocab_size": 100}, "VOCAB_SIZE=100"),
  ],
)
def test_mistakes_are_named(options, says):
  with pytest.raises(UserError) as error:
    task(**options).index()
  assert says in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.filterwarnings("ignore")  # TensorFlow's, SeqIO's and TFDS's own.
def test_a_stream_resumes_exactly_and_says_what_the_texts_say(packed):
  def stream():
    return SeqIOStream(
      register=register_texts, task_split="train", seq_len=32, seed=1, packed=packed
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


@pytest.mark.slow
def test_c4_files_of_tfds_are_read(shared_data):
  data = task(register_c4, task_split="validation", seq_len=128)
  tokens, offsets = data.index()
  assert len(offsets) == 201
  with data.batches(8) as batches:
    arrays = next(batches).arrays
  assert arrays["inputs"].shape == (8, 128)
  assert arrays["weights"].mean() > 0.9
  text = bytes(int(i) - 3 for i in tokens[: offsets[1]]).decode()
  assert len(text) > 100
