# SPDX-License-Identifier: Apache-2.0
"""Imports and exports tokenizers, their settings and the ids of special tokens.

The ids that begin and end texts are in `generation_config.json`, in both formats.
"""

import json
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paxlike import untrusted_files
from paxlike.config import building
from paxlike.convert import sentencepiece_json
from paxlike.convert.safetensors_files import read_json
from paxlike.data.chat import exported_templates, templates
from paxlike.data.tokenizers import token_settings
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.token_settings import TOKENIZER_BYTES
from paxlike.data.tokenizers.tokenizer import Tokenizer
from paxlike.errors import UserError
from paxlike.experiment import Experiment

# File -> value of the knob TOKENIZER; the first file that exists is used, as in transformers.
TOKENIZERS = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece"}
NONE = "has no tokenizer, so it can neither decode nor evaluate text"
_GENERATION = "generation_config.json"
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KINDS = {"huggingface": HuggingFaceTokenizer, "sentencepiece": SentencePieceTokenizer}
# Family -> transformers' defaults for ids that `config.json` lacks, in the order of IDS.
DEFAULT_IDS: Mapping[str, Sequence[int]] = {
  "deepseek_v3": (0, 1),
  "deepseek_v32": (0, 1),
  "gemma": (2, 1, 0),
  "gemma2": (2, 1, 0),
  "gemma3_text": (2, 1, 0),
  "gemma4_text": (2, 1, 0),
  "gpt2": (50256, 50256),
  "llama": (1, 2),
  "llama4_text": (1, 2),
  "mistral": (1, 2),
  "mixtral": (1, 2),
}


def find(folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the path of the tokenizer in a folder, without its settings; None if there is none."""
  return next(
    (folder / name for name in TOKENIZERS if untrusted_files.is_there(folder / name)), None
  )


def files(folder: pathlib.Path) -> list[str]:
  """Returns the names of the tokenizer and its settings in a folder, each once."""
  own = find(folder)
  names = dict.fromkeys((*templates.FILES, *token_settings.FILES))
  there = [name for name in names if untrusted_files.is_there(folder / name)]
  there += sorted(f"{templates.MORE_TEMPLATES}/{file.name}" for file in _more_templates(folder))
  return there if own is None else [own.name, *there]


def _more_templates(folder: pathlib.Path) -> list[pathlib.Path]:
  return list((folder / templates.MORE_TEMPLATES).glob("*.jinja"))


def ids(
  config: Mapping[str, Any], *, model_type: str, vocab_size: int, place: str = "config.json"
) -> dict[str, Any]:
  """Returns the ids of tokens that a `config.json` of transformers declares.

  Args:
    config: The configuration.
    model_type: The family, which gives absent ids their defaults.
    vocab_size: The model's vocabulary size; defaults that are not below it are dropped.
    place: The configuration's file, for errors.

  Raises:
    UserError: One is not an id, or not below `vocab_size`.
  """
  text = config.get("text_config")
  declared = {**(text if isinstance(text, Mapping) else {}), **config}
  token_settings.check_ids(declared, vocab_size, place=place)
  found: dict[str, Any] = {
    name: number
    for name, number in zip(IDS, DEFAULT_IDS.get(model_type, ()), strict=False)
    if name not in declared and number < vocab_size
  }
  for name in IDS:
    if several := token_settings.ids_of(declared, name, place=place):
      found[name] = list(several) if isinstance(declared[name], list) else several[0]
  return found


def copy(source: pathlib.Path, to: pathlib.Path):
  """Copies all tokenizers and settings in a folder.

  Raises:
    UserError: One is not a regular file, is too large, or is a link out of `source`.
  """
  _copy(source, to, {*TOKENIZERS, *files(source)})


def import_tokenizer(source: pathlib.Path, ids: Mapping[str, Any], to: pathlib.Path):
  """Copies the tokenizer in use and its settings; writes `ids` if there is no generation config."""
  _copy(source, to, files(source))
  if ids and not (to / _GENERATION).exists():
    _write(to / _GENERATION, ids)


def check(file: pathlib.Path, graph: Any, *, vocab_size: int):
  """Checks that the tokenizer in `file`, in the root `graph` with text data, fits a vocabulary.

  Raises:
    UserError: It has ids beyond `vocab_size`, or is damaged.
  """
  built = building.build(graph.train_data.corpus.tokenizer)
  if built.vocab_size > vocab_size:
    raise UserError(
      f"{file} has {built.vocab_size} ids, but the model has {vocab_size}: it is the"
      " tokenizer of another model, or the settings beside it add tokens that this one lacks."
    )
  built.check(vocab_size)


def import_file(file: pathlib.Path, name: str, to: pathlib.Path) -> str:
  """Copies a tokenizer under `name`, which is returned, and its settings if it has that name."""
  settings = set(files(file.parent)) - TOKENIZERS.keys() if file.name == name else set()
  _copy(file.parent, to, settings)
  untrusted_files.copy(file, to / name, limit=TOKENIZER_BYTES, folder=None)
  return name


def _copy(source: pathlib.Path, to: pathlib.Path, names: Collection[str]):
  for name in names:
    if untrusted_files.is_there(source / name):
      (to / name).parent.mkdir(exist_ok=True)
      untrusted_files.copy(source / name, to / name, limit=TOKENIZER_BYTES, folder=source)


def file_of(experiment: Experiment) -> tuple[pathlib.Path, str] | None:
  """Returns the file of an experiment's tokenizer, and its name in a Hugging Face folder.

  None: the experiment's tokenizer has no file.

  Raises:
    UserError: The file is missing, or is a folder.
  """
  settings = experiment.values()
  kind = settings["TOKENIZER"].value if "TOKENIZER" in settings else "sentencepiece"
  path = settings["VOCAB_PATH"].value if "VOCAB_PATH" in settings else None
  names = {kind: name for name, kind in TOKENIZERS.items()}
  if path is None or kind not in names:
    return None
  if not pathlib.Path(path).exists():
    raise UserError(
      f"VOCAB_PATH={path}: no such file, so the run's tokenizer cannot be exported: put it"
      " there or, if the path is relative, run paxlike-convert in the folder it is relative to."
    )
  token_settings.check_file(path)
  return pathlib.Path(path), names[kind]


def export_tokenizer(
  experiment: Experiment,
  found: tuple[pathlib.Path, str] | None,
  run: pathlib.Path,
  to: pathlib.Path,
) -> dict[str, Any]:
  """Writes the tokenizer of a run for transformers, and returns the ids for its `config.json`.

  `found` is the result of `file_of`; None: the tokenizer in the run's folder, if any.
  """
  if found is None:
    copy(run, to)
    own = find(to)
  else:
    path, name = found
    own = to / name
    _copy(path.parent, to, set(files(path.parent)) - set(TOKENIZERS))
    # The run may be of someone else: a link in it must not make the export include other files.
    inside = run if path.absolute().is_relative_to(run.absolute()) else None
    untrusted_files.copy(path, own, limit=TOKENIZER_BYTES, folder=inside)
  if own is None:
    return {}
  tokenizer = _KINDS[TOKENIZERS[own.name]](own)
  if own.name == "tokenizer.model":
    sentencepiece_json.write(own, max_len=_length(experiment))
  file = to / _GENERATION
  content = read_json(file) if file.exists() else {}
  declared = {"bos_token_id": tokenizer.prefix_id, "eos_token_id": tokenizer.eos_id}
  missing = {n: v for n, v in declared.items() if v is not None and content.get(n) is None}
  ended = _write_template(experiment, own, tokenizer)
  merged = content | missing
  ends = [*token_settings.ids_of(merged, "eos_token_id", place=str(file))]
  ends += [number for number in ended if number not in ends]
  if ends != [*token_settings.ids_of(merged, "eos_token_id", place=str(file))]:
    merged["eos_token_id"] = ends if len(ends) > 1 else ends[0]
  if merged != content or not content:
    _write(file, merged)
  return {name: merged[name] for name in IDS if merged.get(name) is not None}


def _write_template(
  experiment: Experiment, own: pathlib.Path, tokenizer: Tokenizer
) -> Sequence[int]:
  """Writes the chat template of a run, and returns the ids that end its answers."""
  values = experiment.values()
  if "CHAT_TEMPLATE" not in values:
    return ()
  name = values["CHAT_TEMPLATE"].value
  template = templates.template(name, vocab_path=str(own))
  if name == "tokenizer":
    return templates.turn_end(template, tokenizer).ids
  bos, eos = (
    "" if number is None else tokenizer.text_of(number)
    for number in (tokenizer.bos_id, tokenizer.eos_id)
  )
  _remove_templates(own.parent)
  path = own.parent / templates.FILES[1]
  path.write_text(exported_templates.source(name, bos=bos, eos=eos))
  ends = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
  return (*templates.turn_end(template, tokenizer).ids, *ends)


def _remove_templates(folder: pathlib.Path):
  """Removes all chat templates beside a tokenizer."""
  settings = folder / templates.FILES[0]
  content = read_json(settings) if settings.exists() else {}
  if content.pop("chat_template", None) is not None:
    _write(settings, content)
  for file in (folder / templates.FILES[1], *_more_templates(folder)):
    file.unlink(missing_ok=True)
  if (more := folder / templates.MORE_TEMPLATES).is_dir():
    more.rmdir()


def notes(folder: pathlib.Path) -> list[str]:
  """Returns notes about the tokenizer that `export_tokenizer` wrote, one line each."""
  if find(folder) is None:
    return [NONE]
  model = folder / "tokenizer.model"
  if not model.exists():
    return []
  if (why := sentencepiece_json.unsupported(model)) is None:
    difference = sentencepiece_json.difference(model)
    return [] if difference is None else [difference]
  return [
    f"has no tokenizer.json, as Hugging Face has nothing like {why}: use tokenizer.model with the"
    " library sentencepiece, because transformers would tokenize differently"
  ]


def _length(experiment: Experiment) -> int:
  return experiment.values()["MAX_SEQ_LEN"].value


def _write(path: pathlib.Path, content: Mapping[str, Any]):
  path.write_text(json.dumps(content, indent=2) + "\n")
