# SPDX-License-Identifier: Apache-2.0
"""SeqIO tasks and mixtures as corpora, and the program that reads one into a token index.

SeqIO imports TensorFlow: 8 seconds and 700 MB. So a separate process, `python -m
paxlike.data.seqio.corpus`, reads a task; the training process only opens the resulting index.
"""

import functools
import hashlib
import inspect
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from paxlike import file_io
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data import token_index
from paxlike.data.corpus import Corpus
from paxlike.data.token_index import Document, TokenIndex
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError, did_you_mean

_TOKENIZER = "tokenizer.model"
# Prefixes of the child process's lines that are shown to the user.
_PROGRESS, _ERROR = "progress:", "error:"


@configurable
class SeqIOTask:
  """A SeqIO task or mixture that another process can register again."""

  def __init__(self, register: Callable[..., str]):
    """Reads nothing yet.

    Args:
      register: Adds the task to SeqIO's registry if it is missing, and returns its name. A
        module-level function, because another process calls it by name.
    """
    self._register = register

  def check(self, split: str):
    """Raises UserError if a file that the split needs is missing; imports no TensorFlow."""

  def arguments(self) -> Mapping[str, Any]:
    """Returns the arguments of `register`; plain JSON."""
    return {}

  def files(self) -> Sequence[epath.Path]:
    """Returns the files whose size and time are part of the fingerprint."""
    return ()

  def register(self) -> str:
    """Adds the task to this process's registry, and returns its name."""
    return self._register(**self.arguments())

  def fingerprint(self) -> str:
    """Returns an identifier that changes with the task."""
    stats = [(os.fspath(file), file_io.stat(file)) for file in self.files()]
    files = [(name, stat.length, stat.mtime) for name, stat in stats]
    return json.dumps([self.request(), files])

  def code(self) -> str:
    """Returns the source of the module that registers the task."""
    return inspect.getsource(sys.modules[self._register.__module__])

  def tokenizer(self) -> Tokenizer | None:
    """Returns the task's tokenizer, if it is known without reading the task."""
    return None

  def request(self) -> dict[str, Any]:
    """Returns a description from which another process registers the task; plain JSON."""
    function = f"{self._register.__module__}:{self._register.__qualname__}"
    return {"function": function, "arguments": dict(self.arguments())}


@configurable
class SeqIOCorpus(Corpus):
  """A split of a SeqIO task, read once into a token index."""

  def __init__(
    self,
    *,
    task: SeqIOTask,
    split: ranges.Name,
    vocab_size: ranges.Size,
    bos_id: ranges.NonNegative | None = None,
    lengths: Mapping[str, int] | None = None,
  ):
    """Reads nothing yet.

    Args:
      task: The task.
      split: Its split, such as "train".
      vocab_size: The model's vocabulary size.
      bos_id: If given, a document is [bos_id, inputs, targets], with the loss on `targets` only.
        None: a document is `targets` alone, without a loss mask.
      lengths: Feature -> length to truncate to, SeqIO's `sequence_length`.
    """
    self._task = task
    self._how = {"split": split, "bos_id": bos_id, "lengths": lengths}
    self._vocab_size = vocab_size

  @property
  def vocab_size(self) -> int:
    return self._vocab_size

  @property
  def named(self) -> str:
    return f"split {self._how['split']} of the task"

  def check(self):
    self._task.check(self._how["split"])

  def index(self) -> TokenIndex:
    return token_index.read(self._folder, vocab_size=self._vocab_size)

  @functools.cached_property
  def tokenizer(self) -> Tokenizer | None:  # pyright: ignore[reportIncompatibleVariableOverride]
    """The task's SentencePiece model; None if its vocabulary is of another kind."""
    model = self._folder / _TOKENIZER
    return SentencePieceTokenizer(model) if model.exists() else None

  @functools.cached_property
  def _folder(self) -> pathlib.Path:
    """The folder of the index; built at the first use."""
    request = {"vocab_size": self._vocab_size, **self._how}
    # The Python corpus depends on Python's version.
    made_of = [self._task.fingerprint(), self._task.code(), sys.version]
    key = f"{json.dumps(made_of)} {json.dumps(request)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    folder = token_index.cache_folder() / "seqio" / digest[:24]
    with token_index.built_once(folder) as building:
      if building is not None:
        _read_in_process(request | self._task.request(), building)
    return folder


def _read_in_process(request: Mapping[str, Any], folder: pathlib.Path):
  """Runs `main` in another process, so that TensorFlow's memory is freed with it."""
  environment = os.environ | {
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",  # TensorFlow would allocate the GPUs' memory.
  }
  # -P keeps the working directory off sys.path, unless it is in PYTHONPATH.
  program = [sys.executable, "-P", "-m", "paxlike.data.seqio.corpus"]
  command = [*program, json.dumps(request), str(folder)]
  line = ""
  with tempfile.TemporaryFile("w+", errors="replace") as log:
    # TensorFlow's messages are shown only after an error.
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
      lines = log.readlines()
      last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
      error = UserError(
        f"reading the SeqIO task of {request['function']} failed: {last}. --traceback shows more."
      )
      error.add_note("".join(lines[-40:]))
      raise error


def report(text: str):
  """Prints progress of a task's registration; the parent process forwards it to the user."""
  print(_PROGRESS, text, flush=True)


def main(argv: list[str]) -> int:
  """Writes the index, and the SentencePiece model if any, of the requested task."""
  request, folder = json.loads(argv[1]), pathlib.Path(argv[2])
  vocab_size = request.pop("vocab_size")
  try:
    task = find(_function(request.pop("function"))(**request.pop("arguments")))
    vocabulary = checked_vocabulary(task, vocab_size)
    if model := getattr(vocabulary, "sentencepiece_model_file", None):
      shutil.copyfile(model, folder / _TOKENIZER)
    token_index.write(folder, documents(task, **request), vocab_size=vocab_size)
  except UserError as error:
    print(_ERROR, str(error).replace("\n", " "))
    return 2
  return 0


def checked_vocabulary(task: Any, vocab_size: int) -> Any:
  """Returns the vocabulary of a task's targets; UserError if it has more ids than the model."""
  vocabulary = task.output_features["targets"].vocabulary
  if vocabulary.vocab_size > vocab_size:
    raise UserError(
      f"VOCAB_SIZE={vocab_size}, but the vocabulary of the SeqIO task {task.name} has"
      f" {vocabulary.vocab_size} ids."
    )
  return vocabulary


def documents(
  task: Any, *, split: str, lengths: Mapping[str, int] | None = None, bos_id: int | None = None
) -> Iterator[Document]:
  """Yields the documents of a split of a task.

  Args:
    task: A SeqIO task with the feature `targets` and, if any, `inputs` and `alternatives`.
    split: Such as "train".
    lengths: Feature -> length to truncate to, SeqIO's `sequence_length`. None: no truncation.
    bos_id: See `SeqIOCorpus`.

  Raises:
    UserError: The task lacks the split, or targets and alternatives differ in length.
  """
  if split not in task.splits:
    raise UserError(f"the SeqIO task {task.name} has no split {split}: it has {list(task.splits)}.")
  features: Any = task.get_dataset(lengths, split=split, shuffle=False).as_numpy_iterator()
  for example in features:
    yield example["targets"] if bos_id is None else _joined(bos_id, task.name, **example)


def _joined(
  bos_id: int,
  name: str,
  targets: np.ndarray,
  inputs: np.ndarray | None = None,
  alternatives: np.ndarray | None = None,
  **unused: Any,
) -> Document:
  """Returns [BOS, inputs, targets] with the loss mask on targets."""
  before = [bos_id] if inputs is None else [bos_id, *inputs]
  zeros = np.zeros(len(before), np.int32)
  document = {
    "tokens": np.concatenate([before, targets]).astype(np.int32),
    "weights": np.concatenate([zeros, np.ones_like(targets)]),
  }
  if alternatives is not None:
    if len(alternatives) != len(targets):
      raise UserError(
        f"the task {name} compares two answers of equally many tokens, but this vocabulary gives"
        f" {len(targets)} and {len(alternatives)}: set another VOCAB_PATH."
      )
    document["alternatives"] = np.concatenate([zeros, alternatives])
  return document


def _function(name: str) -> Callable[..., str]:
  import importlib

  module, _, path = name.partition(":")
  return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def find(name: str) -> Any:
  """Returns a registered SeqIO task or mixture.

  Raises:
    UserError: There is none of this name.
  """
  import seqio

  try:
    return seqio.get_mixture_or_task(name)
  except ValueError:
    known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
    raise UserError(f"no SeqIO task or mixture {name}.{did_you_mean(name, known)}") from None


if __name__ == "__main__":
  sys.exit(main(sys.argv))
