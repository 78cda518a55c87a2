# SPDX-License-Identifier: Apache-2.0
"""A SeqIO task streamed by SeqIO itself, for data too large for a token index."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.dataset import Arrays, Batch, Dataset
from paxlike.data.seqio import corpus
from paxlike.data.seqio.corpus import SeqIOTask
from paxlike.data.tokenizers.tokenizer import Tokenizer


@configurable
class SeqIOStream(Dataset):
  """Sequences streamed and packed by SeqIO's own feature converter.

  To resume, the stream is read again and the sequences before the position are skipped.
  """

  def __init__(
    self,
    *,
    task: SeqIOTask,
    task_split: ranges.Name,
    seq_len: ranges.Size,
    vocab_size: ranges.Size,
    bos_id: ranges.NonNegative = 0,
    seed: ranges.NonNegative = 0,
    shuffle: bool = True,
    packed: bool = True,
  ):
    """Reads nothing yet.

    Args:
      task: Has the feature `targets` and optionally `inputs`.
      task_split: Its split, such as "train".
      seq_len: T.
      vocab_size: The model's vocabulary size.
      bos_id: Begins the inputs of each example.
      seed: Seed of the shuffle.
      shuffle: Whether to reshuffle in every epoch.
      packed: Whether a sequence holds as many examples as fit, or one.
    """
    self.seq_len = seq_len
    self._task = task
    self._vocab_size = vocab_size
    self._split = task_split
    self._bos_id = bos_id
    self._seed = seed
    self._shuffle = shuffle
    self.packed = packed

  @functools.cached_property
  def tokenizer(self) -> Tokenizer | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    """The task's tokenizer, if known."""
    return self._task.tokenizer()

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  def check(self):
    self._task.check(self._split)
    if self.tokenizer is not None:
      self.tokenizer.check(self._vocab_size)

  def fingerprint(self) -> str:
    options = (self._split, self.seq_len, self._bos_id, self._seed, self._shuffle, self.packed)
    return f"stream of {self._task.fingerprint()} {options}"

  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[list[Batch]]:
    fingerprint = self.fingerprint()
    pending: list[Arrays] = []
    state: dict[str, Any] = {}
    for at, number, row in self._converted_rows(epoch, position, repeat):
      pending.append(row)
      state = {"epoch": at, "position": number + 1, "fingerprint": fingerprint}
      if len(pending) == batch_size:
        yield [Batch(_stack([pending[i] for i in rows]), state)]
        pending = []
    if pending:
      empty = {name: np.zeros_like(value) for name, value in pending[0].items()}
      pending += [empty] * (batch_size - len(pending))
      yield [Batch(_stack([pending[i] for i in rows]), state)]

  def _converted_rows(
    self, epoch: int, position: int, repeat: bool
  ) -> Iterator[tuple[int, int, Arrays]]:
    """Yields (epoch, index in the epoch, sequence)."""
    import seqio
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # TensorFlow would allocate their memory.
    name = self._task.register()
    task = corpus.find(name)
    corpus.checked_vocabulary(task, self._vocab_size)
    lengths = dict.fromkeys(task.output_features, self.seq_len)
    converter = seqio.DecoderFeatureConverter(pack=self.packed, bos_id=self._bos_id)
    while True:
      dataset = seqio.get_dataset(
        name,
        lengths,
        dataset_split=self._split,
        shuffle=self._shuffle,
        num_epochs=1,
        seed=self._seed + epoch,
        feature_converter=converter,
      )
      for number, features in enumerate(dataset.as_numpy_iterator()):
        if number >= position:
          yield epoch, number, _converted(features)
      if not repeat:
        return
      epoch, position = epoch + 1, 0


def _converted(features: dict[str, np.ndarray]) -> Arrays:
  """Returns a sequence with paxlike's array names."""
  row = {
    "inputs": features["decoder_input_tokens"].astype(np.int32),
    "targets": features["decoder_target_tokens"].astype(np.int32),
    "weights": features["decoder_loss_weights"].astype(np.float32),
  }
  if "decoder_segment_ids" in features:
    row["segments"] = features["decoder_segment_ids"].astype(np.int32)
    row["positions"] = features["decoder_positions"].astype(np.int32)
  return row


def _stack(rows: list[Arrays]) -> Arrays:
  return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
