# SPDX-License-Identifier: Apache-2.0
"""Trains a SentencePiece model: `paxlike-vocabulary --data=TEXTS --size=8000`."""

import argparse
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.errors import UserError
from paxlike.telemetry import console

_HELP = """\
Trains a SentencePiece vocabulary on texts: .txt, .jsonl (.zst, .gz), .parquet or .arrow files, as
in DATA_PATH. Encoding is lossless, including tabs, newlines and spaces: characters outside of the
vocabulary become bytes. Each digit is its own token. The only exception is U+2581, which the
library uses for the space: it is decoded to a space.
"""
_CHARACTERS = 1000  # Length of a training sentence: the library skips longer ones.
_SAMPLE = 5_000_000  # Number of training sentences, sampled if there are more: about 1 GB.


def main() -> int:
  """Entry point of the `paxlike-vocabulary` command. Returns the exit status."""
  console.outlive_readers()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs a command line; returns the exit status: 0, or 2 for a user error."""
  return console.exit_status("paxlike-vocabulary", lambda: _vocabulary(argv))


def _vocabulary(argv: Sequence[str]) -> int:
  parser = console.Parser(prog="paxlike-vocabulary", description=_HELP)
  parser.add_argument(
    "--data", type=console.path, required=True, help="a file, folder or glob, as in DATA_PATH"
  )
  parser.add_argument("--field", default="text", help="field of records that has the text")
  parser.add_argument("--size", type=int, required=True, help="number of tokens")
  parser.add_argument("--kind", choices=("bpe", "unigram"), default="bpe")
  parser.add_argument(
    "--to",
    type=console.path,
    default="vocabulary.model",
    metavar="FILE.model",
    help="file to create (default: vocabulary.model)",
  )
  print(_make(parser.parse_args(argv)))
  return 0


def _make(options: argparse.Namespace) -> str:
  to = file_io.absolute(options.to)
  _check(options.to, to)
  texts = _Texts(options.data, options.field)
  content = _train(texts, size=options.size, kind=options.kind)
  try:
    to.parent.mkdir(parents=True, exist_ok=True)
    file_io.write(to, content)
  except file_io.failures() as error:
    raise UserError(f"--to={options.to} cannot be written: {file_io.reason(error)}.") from error
  return (
    f"{to}: {options.size} tokens, trained on {texts.characters:,} characters\n"
    f"--fdl.TOKENIZER=sentencepiece --fdl.VOCAB_PATH={to} --fdl.VOCAB_SIZE={options.size}"
  )


def _check(given: str, to: epath.Path):
  """Raises a UserError if the file already exists, or does not end with .model."""
  if to.exists() or os.path.lexists(to):
    raise UserError(f"--to={given} already exists: name a new file.")
  if not to.name.endswith(".model"):
    raise UserError(f"--to={given}: expected a name that ends with .model.")


class _Texts:
  """The sentences of all files; stores the error of a file, which the library would discard.

  Attributes:
    characters: The number of characters yielded.
    error: The error that ended the iteration early.
  """

  def __init__(self, path: str, field: str):
    """Finds the files.

    Raises:
      UserError: There is none.
    """
    from paxlike.data.text import find_files, text_files

    self.characters = 0
    self.error: UserError | None = None
    self._read = text_files.read
    self._field = field
    try:
      self._files = find_files.find(path, text_files.SUFFIXES, knob="DATA_PATH", any_single=True)
    except UserError as error:
      raise UserError(str(error).replace("DATA_PATH", "--data")) from None

  def __iter__(self) -> Iterator[str]:
    for name in self._files:
      try:
        for text in self._read(name, self._field):
          yield from self._sentences(text.encode("utf-8", "replace").decode("utf-8"))
      except (OSError, EOFError, UnicodeDecodeError) as error:
        self.error = UserError(f"--data: {name} cannot be read: {error}.")
        return
      except UserError as error:
        self.error = UserError(str(error).replace("set DATA_FIELD", "set --field"))
        return

  def _sentences(self, text: str) -> Iterator[str]:
    for line in text.split("\n"):
      for begin in range(0, len(line), _CHARACTERS):
        part = line[begin : begin + _CHARACTERS].replace("\0", "")
        self.characters += len(part)
        if part:
          yield part


def _train(texts: _Texts, *, size: int, kind: str) -> bytes:
  import sentencepiece

  model, trainer = io.BytesIO(), sentencepiece.SentencePieceTrainer
  options: dict[str, Any] = {
    "model_type": kind,
    "vocab_size": size,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "user_defined_symbols": ["\n"],
    "max_sentence_length": 4 * _CHARACTERS,
    "input_sentence_size": _SAMPLE,
    "shuffle_input_sentence": True,
    "pad_id": 0,
    "eos_id": 1,
    "unk_id": 2,
    "bos_id": -1,
    "num_threads": os.cpu_count() or 1,
    "minloglevel": 2,
  }
  try:
    trainer.train(sentence_iterator=iter(texts), model_writer=model, **options)
  except (RuntimeError, OSError) as error:
    raise texts.error or _refusal(str(error), size, texts.characters) from error
  if texts.error is not None:
    raise texts.error
  return model.getvalue()


def _refusal(said: str, size: int, characters: int) -> UserError:
  if not characters:
    return UserError("--data has no text.")
  if most := re.search(r"Vocabulary size too high.* <= (\d+)", said):
    return UserError(
      f"--size={size}: the texts support at most {most[1]} tokens: set --size={most[1]}, or"
      " give more text."
    )
  if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", said):
    return UserError(
      f"--size={size} is too small: bytes and the characters of the texts need {least[1]} tokens:"
      f" set --size={int(least[1]) + 1} or more."
    )
  return UserError(f"--size={size}: {said.splitlines()[-1].rstrip('.')}.")


if __name__ == "__main__":
  sys.exit(main())
