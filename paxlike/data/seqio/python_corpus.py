# SPDX-License-Identifier: Apache-2.0
"""The text of Python's standard library: real data that every machine has.

The sources of the running Python and the texts of its `help()` are written by a TFDS builder and
read by a SeqIO task, with a SentencePiece model trained on them.
"""

import functools
import hashlib
import os
import pathlib
import sys
import sysconfig
from collections.abc import Iterator
from typing import Any

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data import token_index
from paxlike.data.packing import PackedRows
from paxlike.data.seqio.corpus import SeqIOCorpus, SeqIOTask, report

NAME = "python_stdlib"
VOCAB_SIZE = 4096
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@configurable(name="python_corpus")
def dataset(
  *,
  split: str,
  seq_len: ranges.Size,
  vocab_size: ranges.Size,
  seed: ranges.NonNegative = 0,
  shuffle: bool = True,
) -> PackedRows:
  """Returns a split of the corpus, "train" or "validation" (every twentieth file), packed."""
  corpus = SeqIOCorpus(task=SeqIOTask(register), split=split, vocab_size=vocab_size)
  return PackedRows(corpus=corpus, seq_len=seq_len, seed=seed, shuffle=shuffle)


def register() -> str:
  """Builds missing files, adds the SeqIO task and returns its name."""
  import seqio

  if NAME not in seqio.TaskRegistry.names():
    data: Any = seqio.TfdsDataSource(f"{NAME}:1.0.0", str(tfds_folder()), splits=_SPLITS)
    vocabulary = seqio.SentencePieceVocabulary(str(vocabulary_file()), extra_ids=0)
    report("tokenizing it through SeqIO")
    seqio.TaskRegistry.add(
      NAME,
      source=data,
      preprocessors=[
        functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
        seqio.preprocessors.tokenize,
      ],
      output_features={"targets": seqio.Feature(vocabulary, add_eos=False)},
    )
  return NAME


_SPLITS = ("train", "validation")


def sources() -> list[tuple[str, str]]:
  """Returns (name, text) of every document of the corpus."""
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  found = []
  for path in sorted(library.rglob("*.py")):
    name = path.relative_to(library)
    if not _LEFT_OUT.intersection(name.parts):
      text = path.read_text("utf-8", "ignore")
      if text.strip():
        found.append((name.as_posix(), text))
  return found + [(f"help({name!r})", text) for name, text in sorted(_topics().items())]


def _topics() -> dict[str, str]:
  try:
    from pydoc_data import topics
  except ImportError:  # A Python built without its documentation.
    return {}
  return topics.topics


def _is_held_out(name: str) -> bool:
  return hashlib.sha256(name.encode()).digest()[0] % 20 == 0


def _folder(part: str) -> pathlib.Path:
  version = hashlib.sha256(f"{sys.version} {sysconfig.get_path('stdlib')}".encode()).hexdigest()
  return token_index.cache_folder() / NAME / version[:12] / part


def tfds_folder() -> pathlib.Path:
  """Returns the folder of the TFDS data set; builds it if missing."""
  folder = _folder("tfds")
  with token_index.built_once(folder) as building:
    if building is not None:
      report("writing the standard library's text as a TFDS data set")
      _builder(building).download_and_prepare()
  return folder


def _builder(folder: pathlib.Path) -> Any:
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()

  class PythonStdlib(tfds.core.GeneratorBasedBuilder):
    """The sources and help texts of one Python."""

    VERSION = tfds.core.Version("1.0.0")
    name = NAME

    def _info(self) -> Any:
      features = {"name": tfds.features.Text(), "text": tfds.features.Text()}
      return tfds.core.DatasetInfo(
        builder=self,
        description="The text of Python's standard library.",
        features=tfds.features.FeaturesDict(features),
      )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
      del dl_manager
      return {"train": self._examples(False), "validation": self._examples(True)}

    def _examples(self, held_out: bool) -> Iterator[tuple[str, dict[str, str]]]:
      for name, text in sources():
        if _is_held_out(name) == held_out:
          yield name, {"name": name, "text": text}

    def _generate_examples(self) -> Iterator[tuple[str, dict[str, str]]]:
      return self._examples(False)

  return PythonStdlib(data_dir=str(folder))


def vocabulary_file() -> pathlib.Path:
  """Returns the SentencePiece model of the training split; trains it if missing."""
  folder = _folder("vocabulary")
  with token_index.built_once(folder) as building:
    if building is not None:
      report(f"training a SentencePiece model of {VOCAB_SIZE} pieces")
      _train_vocabulary(building / "python.model")
  return folder / "python.model"


def _train_vocabulary(path: pathlib.Path):
  """Trains a lossless model: line ends, indentation and any character are preserved."""
  import sentencepiece
  import tensorflow_datasets as tfds

  builder: Any = tfds.builder(f"{NAME}:1.0.0", data_dir=str(tfds_folder()))
  examples: Any = tfds.as_numpy(builder.as_dataset(split="train"))
  texts = (example["text"].decode() for example in examples)
  lines = (line for text in texts for line in text.split("\n") if line)
  with open(path, "wb") as model:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=lines,
      model_writer=model,
      model_type="bpe",
      vocab_size=VOCAB_SIZE,
      byte_fallback=True,
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      allow_whitespace_only_pieces=True,
      user_defined_symbols=["\n"],
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      num_threads=os.cpu_count() or 1,
      minloglevel=2,
    )
