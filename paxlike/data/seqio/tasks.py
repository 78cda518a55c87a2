# SPDX-License-Identifier: Apache-2.0
"""The SeqIO tasks of Pax's GPU recipes, over TFDS: the Pile, C4, LAMBADA and BoolQ.

Each function adds its task to SeqIO's registry; only these functions import TensorFlow.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.seqio.corpus import SeqIOTask
from paxlike.data.tokenizers import token_settings
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError

SHUFFLE_BUFFER_SIZE = 100_000


@configurable
class TfdsTask(SeqIOTask):
  """A task of this module, with the files that it reads."""

  def __init__(
    self, register: Callable[..., str], *, tfds_name: ranges.Name, vocab_path: ranges.Path | None
  ):
    """Reads nothing yet.

    Args:
      register: One of the functions below, for example.
      tfds_name: `name:1.0.0` or `name/config:1.0.0` under $TFDS_DATA_DIR, or a folder written by
        TFDS.
      vocab_path: A SentencePiece model.
    """
    super().__init__(register)
    self._tfds_name = tfds_name
    self._vocab_path = vocab_path

  def check(self, split: str):
    info, vocabulary = self.files()
    if not vocabulary.exists():
      raise UserError(f"VOCAB_PATH={vocabulary}: no such file.")
    token_settings.check_file(vocabulary)
    try:
      splits = [part["name"] for part in json.loads(info.read_text())["splits"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
      raise UserError(f"{info} cannot be read: {error}.") from error
    check_features(info.parent)
    if split not in splits:
      raise UserError(f"{info.parent} has no split {split}: it has {', '.join(splits)}.")

  def arguments(self) -> Mapping[str, Any]:
    return {"folder": os.fspath(tfds_folder(self._tfds_name)), "vocab_path": self._vocab_path}

  def tokenizer(self) -> Tokenizer:
    _, vocabulary = self.files()
    return SentencePieceTokenizer(vocabulary)

  def files(self) -> Sequence[epath.Path]:
    if not self._vocab_path:
      raise UserError(
        "VOCAB_PATH is not set: give --fdl.VOCAB_PATH=FILE (a SentencePiece model), or set the"
        " environment variable VOCAB_PATH."
      )
    return tfds_folder(self._tfds_name) / _INFO, epath.Path(self._vocab_path).expanduser()


_INFO = "dataset_info.json"


def check_features(folder: epath.Path):
  """Checks that a TFDS data set names only TFDS's feature classes: TFDS would import any other.

  Raises:
    UserError: It names another class, or its features cannot be read.
  """
  path = folder / "features.json"
  try:
    names = [*_feature_classes(json.loads(path.read_text()))]
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} cannot be read: {error}.") from error
  for name in names:
    if not name.startswith("tensorflow_datasets."):
      raise UserError(
        f"{path} names the class {name!r}, which TFDS would import: paxlike accepts only feature"
        " classes of tensorflow_datasets."
      )


def _feature_classes(node: Any) -> Iterator[str]:
  """Yields the classes named by a TFDS `features.json`, also in the nested JSON of old versions."""
  if isinstance(node, str) and node.lstrip().startswith(("{", "[")):
    with contextlib.suppress(ValueError):
      yield from _feature_classes(json.loads(node))
  elif isinstance(node, list):
    for item in node:
      yield from _feature_classes(item)
  elif isinstance(node, dict):
    for key, item in node.items():
      if key in ("pythonClassName", "python_class_name", "type") and isinstance(item, str):
        yield item
      yield from _feature_classes(item)


def tfds_data_dir() -> epath.Path:
  """Returns TFDS's data directory."""
  return file_io.absolute(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def tfds_folder(name: str) -> epath.Path:
  """Returns the folder of a TFDS data set, given its name or its folder.

  Raises:
    UserError: There is no such data set.
  """
  folder = file_io.absolute(name)
  if (folder / _INFO).exists():
    return folder
  dataset, _, version = name.partition(":")
  folder = tfds_data_dir() / dataset / version
  if (folder / _INFO).exists():
    return folder
  scripts = {"the_pile": "the_pile", "c4/en": "c4", "my_lambada": "lambada"}
  script = scripts.get(dataset, "boolq" if dataset == "super_glue/boolq" else None)
  make = f"make it with scripts/download_{script}.py, " if script else ""
  raise UserError(
    f"no TFDS data set {name} in {tfds_data_dir()}: {make}set --tfds_data_dir, or set"
    " --fdl.TFDS_NAME to a folder with a dataset_info.json."
  )


@configurable
def the_pile_lm(*, folder: str, vocab_path: str) -> str:
  """The Pile: 128 documents are concatenated at a time and split into chunks that end with EOS."""

  def pieces(dataset: Any, sequence_length: Mapping[str, int]) -> Any:
    dataset = _concatenated(dataset, num_documents=128)
    return _split(dataset, length=sequence_length["targets"] - 1)

  return _add(
    "the_pile_lm",
    folder,
    [_text_as_targets, "tokenize", pieces, "append_eos"],
    _features(vocab_path, "targets", add_eos=True),
  )


@configurable
def c4(*, folder: str, vocab_path: str) -> str:
  """C4: one document per example, without EOS; packing adds it."""
  features = _features(vocab_path, "targets", add_eos=False)
  return _add("c4", folder, [_text_as_targets, "tokenize"], features)


@configurable
def lambada_eval(*, folder: str, vocab_path: str) -> str:
  """LAMBADA: predict the last word of a passage from all words before it."""

  def words(example: Mapping[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    text = tf.strings.strip(example["text"])
    for curly, straight in (("[“”]", '"'), ("[‘’]", "'")):
      text = tf.strings.regex_replace(text, curly, straight)
    last = tf.strings.regex_replace(text, r"(?s)^.*\s", "")
    before = tf.strings.regex_replace(text, r"\S+$", "")
    return {"inputs": tf.strings.strip(before), "targets": tf.strings.join([" ", last])}

  return _add(
    "lambada_eval",
    folder,
    [lambda dataset: dataset.map(words), "tokenize"],
    _features(vocab_path, "inputs", "targets", add_eos=False),
  )


@configurable
def boolq(*, folder: str, vocab_path: str) -> str:
  """BoolQ: answer a question about a passage by yes or no."""

  def question(example: Mapping[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    parts = [example["passage"], "\nquestion: ", example["question"], "?\nanswer:"]
    answer = example["label"] == 1
    return {
      "inputs": tf.strings.join(parts),
      "targets": tf.where(answer, "yes", "no"),
      "alternatives": tf.where(answer, "no", "yes"),
    }

  return _add(
    "boolq",
    folder,
    [lambda dataset: dataset.map(question), "tokenize"],
    _features(vocab_path, "inputs", "targets", "alternatives", add_eos=False),
  )


def _add(name: str, folder: str, preprocessors: list[Any], features: dict[str, Any]) -> str:
  """Adds a task over the TFDS data set in `folder`; a string names a preprocessor of SeqIO."""
  import seqio
  import tensorflow_datasets as tfds

  check_features(epath.Path(folder))
  builder: Any = tfds.builder_from_directory(folder)

  def read(split: str, shuffle_files: bool, seed: int | None = None) -> Any:
    config = tfds.ReadConfig(shuffle_seed=seed)
    return builder.as_dataset(split=split, shuffle_files=shuffle_files, read_config=config)

  source: Any = seqio.FunctionDataSource(read, splits=tuple(builder.info.splits))
  # A registered task may have another folder or vocabulary.
  seqio.TaskRegistry.remove(name)
  seqio.TaskRegistry.add(
    name,
    source=source,
    preprocessors=[
      getattr(seqio.preprocessors, step) if isinstance(step, str) else step
      for step in preprocessors
    ],
    output_features=features,
    shuffle_buffer_size=SHUFFLE_BUFFER_SIZE,
  )
  return name


def _features(vocab_path: str, *names: str, add_eos: bool) -> dict[str, Any]:
  import seqio

  vocabulary = seqio.SentencePieceVocabulary(os.path.expanduser(vocab_path), extra_ids=0)
  return {name: seqio.Feature(vocabulary, add_eos=add_eos) for name in names}


def _text_as_targets(dataset: Any) -> Any:
  return dataset.map(lambda example: {"targets": example["text"]})


def _concatenated(dataset: Any, *, num_documents: int) -> Any:
  """Concatenates the tokens of `num_documents` documents at a time."""

  def flat(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"targets": batch["targets"].flat_values}

  kept = dataset.map(lambda example: {"targets": example["targets"]})
  return kept.ragged_batch(num_documents).map(flat)


def _split(dataset: Any, *, length: int) -> Any:
  """Splits tokens into chunks of `length`; the last may be shorter."""

  def pieces(example: Any) -> Any:
    import tensorflow as tf

    whole: Any = tf.data.Dataset.from_tensor_slices(example)
    return whole.batch(length)

  return dataset.flat_map(pieces)
