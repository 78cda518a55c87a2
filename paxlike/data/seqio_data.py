# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks and mixtures as data sets: read once into a token index, or streamed.

SeqIO brings TensorFlow, 8 seconds and 700 MB. A program of its own, `python -m
paxlike.data.seqio_data`, reads a task; the training process only ever opens its result.
"""

import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from paxlike.data import token_index
from paxlike.data.dataset import Arrays, Batch, Dataset
from paxlike.data.packing import PackedRows
from paxlike.data.tokenizer import SentencePieceTokenizer, Tokenizer
from paxlike.errors import UserError, did_you_mean

_TOKENIZER = "tokenizer.model"
# Of the lines that the other process prints, those that are for the user.
_PROGRESS, _ERROR = "progress:", "error:"


class SeqIOTask(PackedRows):
  """The token ids of a SeqIO task or mixture, read once and then cut as `PackedRows` says."""

  def __init__(
    self,
    *,
    register: Callable[[], str],
    task_split: str,
    vocab_size: int,
    feature: str = "targets",
    seq_len: int,
    seed: int = 0,
    shuffle: bool = True,
    packed: bool = True,
    split: tuple[float, float] = (0.0, 1.0),
  ):
    """Reads nothing yet.

    Args:
      register: Adds the task to SeqIO's registry if it is not there, and returns its name. A
        function of a module, since another process calls it.
      task_split: The split of the task, such as "train".
      vocab_size: Ids that the model knows.
      feature: The feature that holds the ids.
      seq_len: See `PackedRows`, as for the other arguments.
      seed: See there.
      shuffle: See there.
      packed: See there.
      split: See there.
    """
    super().__init__(seq_len=seq_len, seed=seed, shuffle=shuffle, packed=packed, split=split)
    self._register = register
    self._task_split = task_split
    self._vocab_size = vocab_size
    self._feature = feature

  def index(self) -> token_index.TokenIndex:
    return token_index.read(self._folder, vocab_size=self._vocab_size)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    """The task's SentencePiece model; None if it has another kind of vocabulary."""
    model = self._folder / _TOKENIZER
    return SentencePieceTokenizer(model) if model.exists() else None

  @functools.cached_property
  def _folder(self) -> pathlib.Path:
    """Where the index is; made now if this is the first use."""
    function = f"{self._register.__module__}:{self._register.__qualname__}"
    request = [function, self._task_split, self._feature, self._vocab_size, _python()]
    digest = hashlib.sha256(json.dumps(request).encode()).hexdigest()
    folder = token_index.cache_folder() / "seqio" / digest[:24]
    with token_index.built_once(folder) as building:
      if building is not None:
        _read_elsewhere([*request[:4], str(building)])
    return folder


def _python() -> str:
  # TinyPython's text is that of the Python that runs.
  return sys.version


def _read_elsewhere(request: list[Any]):
  """Runs `main` in another process, so that TensorFlow's memory is returned with it."""
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",  # TensorFlow would take the memory of the GPUs.
  }
  command = [sys.executable, "-m", "paxlike.data.seqio_data", json.dumps(request)]
  line = ""
  with tempfile.TemporaryFile("w+", errors="replace") as log:
    # What TensorFlow says of itself is of interest only if something goes wrong.
    with subprocess.Popen(
      command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
    ) as process:
      for line in process.stdout or ():
        if line.startswith(_PROGRESS):
          print(line.removeprefix(_PROGRESS).strip(), file=sys.stderr, flush=True)
    if process.returncode == 2:
      raise UserError(line.removeprefix(_ERROR).strip())
    if process.returncode != 0:
      log.seek(0)
      last = "".join(log.readlines()[-20:])
      raise UserError(f"reading the SeqIO task of {request[0]} failed:\n{last}")


def report(text: str):
  """Tells the user what a task's registration is doing, which runs in the other process."""
  print(_PROGRESS, text, flush=True)


def main(argv: list[str]) -> int:
  """Writes the index, and the SentencePiece model if any, of the task that a request names."""
  function, split, feature, vocab_size, folder = json.loads(argv[1])
  try:
    name = _function(function)()
    task = _task(name)
    if split not in task.splits:
      raise UserError(f"the SeqIO task {name} has no split {split}: it has {list(task.splits)}.")
    if feature not in task.output_features:
      raise UserError(f"the SeqIO task {name} has no feature {feature}.")
    vocabulary = task.output_features[feature].vocabulary
    if vocabulary.vocab_size > vocab_size:
      raise UserError(
        f"VOCAB_SIZE={vocab_size}, but the vocabulary of the SeqIO task {name} has"
        f" {vocabulary.vocab_size} ids."
      )
    if model := getattr(vocabulary, "sentencepiece_model_file", None):
      shutil.copyfile(model, pathlib.Path(folder) / _TOKENIZER)
    examples = task.get_dataset(None, split=split, shuffle=False).as_numpy_iterator()
    documents = (np.asarray(example[feature], np.int32) for example in examples)
    token_index.write(pathlib.Path(folder), documents, vocab_size=vocab_size)
  except UserError as error:
    print(_ERROR, str(error).replace("\n", " "))
    return 2
  return 0


def _function(name: str) -> Callable[[], str]:
  import importlib

  module, _, path = name.partition(":")
  return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def _task(name: str) -> Any:
  import seqio

  try:
    return seqio.get_mixture_or_task(name)
  except ValueError:
    known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    raise UserError(f"no SeqIO task or mixture {name}.{did_you_mean(name, known)}") from None


class SeqIOStream(Dataset):
  """A SeqIO task streamed and packed by SeqIO's own feature converter: data too large to index.

  Its place in the data is a number of rows, which a restart reads again and drops.
  """

  def __init__(
    self,
    *,
    register: Callable[[], str],
    task_split: str,
    seq_len: int,
    seed: int = 0,
    shuffle: bool = True,
    packed: bool = True,
  ):
    """Arguments as for `SeqIOTask`; the task has the features `targets` and, if any, `inputs`."""
    self.seq_len = seq_len
    self._register = register
    self._split = task_split
    self._seed = seed
    self._shuffle = shuffle
    self._packed = packed

  def fingerprint(self) -> str:
    options = (self._split, self.seq_len, self._seed, self._shuffle, self._packed)
    return f"stream of {self._register.__module__}:{self._register.__qualname__} {options}"

  def _generate(
    self, batch_size: int, rows: np.ndarray, epoch: int, position: int, repeat: bool
  ) -> Iterator[Batch]:
    fingerprint = self.fingerprint()
    pending: list[Arrays] = []
    state: dict[str, Any] = {}
    for at, number, row in self._converted_rows(epoch, position, repeat):
      pending.append(row)
      state = {"epoch": at, "position": number + 1, "fingerprint": fingerprint}
      if len(pending) == batch_size:
        yield Batch(_stack([pending[i] for i in rows]), state)
        pending = []
    if pending:
      empty = {name: np.zeros_like(value) for name, value in pending[0].items()}
      pending += [empty] * (batch_size - len(pending))
      yield Batch(_stack([pending[i] for i in rows]), state)

  def _converted_rows(
    self, epoch: int, position: int, repeat: bool
  ) -> Iterator[tuple[int, int, Arrays]]:
    """Yields (epoch, number in it, row)."""
    import seqio

    name = self._register()
    task = _task(name)
    lengths = dict.fromkeys(task.output_features, self.seq_len)
    while True:
      dataset = seqio.get_dataset(
        name,
        lengths,
        dataset_split=self._split,
        shuffle=self._shuffle,
        num_epochs=1,
        seed=self._seed + epoch,
        feature_converter=seqio.DecoderFeatureConverter(pack=self._packed),
      )
      for number, features in enumerate(dataset.as_numpy_iterator()):
        if number >= position:
          yield epoch, number, _converted(features)
      if not repeat:
        return
      epoch, position = epoch + 1, 0


def _converted(features: dict[str, np.ndarray]) -> Arrays:
  """Returns a row under our names."""
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


if __name__ == "__main__":
  sys.exit(main(sys.argv))
