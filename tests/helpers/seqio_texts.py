# SPDX-License-Identifier: Apache-2.0
"""A small SeqIO task, in a module that other processes can import."""

import functools
from typing import Any

import numpy as np

TEXTS = [f"document {i}: {'la ' * (i % 7)}end" for i in range(40)]


def register(name, source):
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

  return register("texts", lambda seqio: seqio.FunctionDataSource(dataset, splits=("train",)))


def bytes_of(text):
  return np.frombuffer(text.encode(), np.uint8) + 3  # seqio.ByteVocabulary's special ids.
