# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, and what a model's folder says of tokens, on their way in and out.

The ids that begin and end texts stand in `generation_config.json` on both sides.
"""

import json
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from paxlike import input_files
from paxlike.convert import sentencepiece_json
from paxlike.convert.tensors import read_json
from paxlike.data import chat, token_settings
from paxlike.data.tokenizer import TOKENIZER_BYTES, Tokenizer
from paxlike.experiment import Experiment

# File -> the knob TOKENIZER for it; the first that is there is taken.
TOKENIZERS = {"tokenizer.model": "sentencepiece", "tokenizer.json": "huggingface"}
_GENERATION = "generation_config.json"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def files(folder: pathlib.Path) -> list[str]:
  """Returns the names of tokenizers' files that are there, each once."""
  names = dict.fromkeys((*TOKENIZERS, *chat.FILES, *token_settings.FILES))
  return [name for name in names if input_files.is_there(folder / name)]


def copy(source: pathlib.Path, to: pathlib.Path):
  """Copies what is there of tokenizers' files.

  Raises:
    UserError: One is no file, too large, or a link to outside of `source`.
  """
  for name in files(source):
    input_files.copy(source / name, to / name, limit=TOKENIZER_BYTES, folder=source)


def bring(source: pathlib.Path, config: Mapping[str, Any], to: pathlib.Path):
  """Copies the same of a model of Hugging Face, with the ids that its `config.json` declares."""
  copy(source, to)
  if not (to / _GENERATION).exists():
    ids = {name: config[name] for name in _IDS if config.get(name) is not None}
    if ids:
      _write(to / _GENERATION, ids)


def folder_of(experiment: Experiment) -> tuple[pathlib.Path, str] | None:
  """Returns where the tokenizer of an experiment is, and what its file is called elsewhere.

  None: the experiment has none in a file, or the file is gone.
  """
  settings = experiment.values()
  kind = settings["TOKENIZER"].value if "TOKENIZER" in settings else "sentencepiece"
  path = settings["VOCAB_PATH"].value if "VOCAB_PATH" in settings else None
  names = {kind: name for name, kind in TOKENIZERS.items()}
  if path is None or kind not in names or not pathlib.Path(path).is_file():
    return None
  return pathlib.Path(path), names[kind]


def take(experiment: Experiment, run: pathlib.Path, to: pathlib.Path) -> dict[str, Any]:
  """Writes the tokenizer of a run for transformers, and returns the ids for its `config.json`."""
  found = folder_of(experiment)
  if found is None:
    copy(run, to)
  else:
    path, name = found
    copy(path.parent, to)
    shutil.copyfile(path, to / name)
  if (to / "tokenizer.model").exists() and not (to / "tokenizer.json").exists():
    sentencepiece_json.write(to / "tokenizer.model", max_len=_length(experiment))
  ids = {}
  if (to / _GENERATION).exists():
    ids = {n: v for n, v in read_json(to / _GENERATION).items() if n in _IDS and v is not None}
  elif tokenizer := _open(to):
    told = {"bos_token_id": tokenizer.prefix_id, "eos_token_id": tokenizer.eos_id}
    ids = {name: value for name, value in told.items() if value is not None}
    _write(to / _GENERATION, ids)
  return ids


def _open(folder: pathlib.Path) -> Tokenizer | None:
  from paxlike.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer

  if (folder / "tokenizer.model").exists():
    return SentencePieceTokenizer(folder / "tokenizer.model")
  if (folder / "tokenizer.json").exists():
    return HuggingFaceTokenizer(folder / "tokenizer.json")
  return None


def _length(experiment: Experiment) -> int:
  return experiment.values()["MAX_SEQ_LEN"].value


def _write(path: pathlib.Path, told: Mapping[str, Any]):
  path.write_text(json.dumps(told, indent=2) + "\n")
