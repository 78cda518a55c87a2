# SPDX-License-Identifier: Apache-2.0
"""Measures the data pipeline: tokens per CPU-second.

    python benchmarks/data.py [--megabytes=8] [--seq_len=1024] [--batch_size=32]

prints one JSON line for each case. The text is that of the standard library's sources. `prepared`
is batches from a token index that exists, shuffled, on one thread; `tokenize` turns text into ids
and writes the index.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from paxlike.data.packing import PackedRows
from paxlike.data.text import TextFiles
from paxlike.data.tokenizer import (
  ByteTokenizer,
  CharacterTokenizer,
  SentencePieceTokenizer,
  Tokenizer,
)

NUM_PIECES = 4096


def sources(num_bytes: int) -> Iterator[str]:
  """Yields standard library modules, in the order of their names, of so many bytes in all."""
  for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
    if num_bytes <= 0:
      return
    text = path.read_text(encoding="utf-8")
    num_bytes -= len(text)
    yield text


def write_documents(path: pathlib.Path, num_bytes: int):
  """Writes the sources as .jsonl, again and again until there are so many bytes."""
  with path.open("w", encoding="utf-8") as file:
    while file.tell() < num_bytes:
      for text in sources(num_bytes - file.tell()):
        file.write(json.dumps({"text": text}) + "\n")


def train_pieces(folder: pathlib.Path) -> pathlib.Path:
  """Returns a new SentencePiece model."""
  import sentencepiece

  path = folder / "pieces.model"
  with path.open("wb") as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=itertools.chain.from_iterable(t.splitlines() for t in sources(1_000_000)),
      model_writer=file,
      vocab_size=NUM_PIECES,
      model_type="bpe",
      byte_fallback=True,
      minloglevel=2,
    )
  return path


def data(path: pathlib.Path, tokenizer: Tokenizer, **options: Any) -> PackedRows:
  """Returns the data set of a file."""
  vocab_size = tokenizer.vocab_size
  arguments: dict[str, Any] = {"seq_len": 1024} | options
  corpus = TextFiles(path=str(path), tokenizer=tokenizer, vocab_size=vocab_size)
  return PackedRows(corpus=corpus, **arguments)


def tokenize(path: pathlib.Path, name: str, tokenizer: Tokenizer):
  """Times making the index."""
  source = data(path, tokenizer)
  began = time.process_time()
  num_tokens = len(source.corpus.index().tokens)
  report("tokenize", num_tokens, time.process_time() - began, tokenizer=name)


def prepared(path: pathlib.Path, tokenizer: Tokenizer, *, batch_size: int, seq_len: int):
  """Times batches from the index, with and without segments."""
  for packed in (True, False):
    source = data(path, tokenizer, packed=packed, seq_len=seq_len)
    num_batches = max(10_000_000 // (batch_size * seq_len), 8)
    with source.batches(batch_size) as batches:
      next(batches)  # Reads the index.
      began = time.process_time()
      collections.deque(itertools.islice(batches, num_batches), maxlen=0)
      seconds = time.process_time() - began
    num_tokens = num_batches * batch_size * seq_len
    sizes = {"seq_len": seq_len, "batch_size": batch_size}
    report("prepared", num_tokens, seconds, packed=packed, **sizes)


def report(case: str, num_tokens: int, cpu_seconds: float, **options: str | int | bool):
  """Prints a result."""
  values = {
    "case": case,
    **options,
    "tokens": num_tokens,
    "cpu_seconds": round(cpu_seconds, 4),
    "tokens_per_cpu_second": round(num_tokens / cpu_seconds),
  }
  print(json.dumps(values), flush=True)


def main():
  parser = argparse.ArgumentParser(description="Measures the data pipeline.")
  parser.add_argument("--megabytes", type=float, default=8, help="of text")
  parser.add_argument("--seq_len", type=int, default=1024)
  parser.add_argument("--batch_size", type=int, default=32)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    os.environ["PAXLIKE_CACHE"] = str(folder / "cache")
    path = folder / "documents.jsonl"
    write_documents(path, int(options.megabytes * 1e6))
    tokenizers: dict[str, Tokenizer] = {
      "byte": ByteTokenizer(),
      "character": CharacterTokenizer("".join(sources(int(options.megabytes * 1e6)))),
      "sentencepiece": SentencePieceTokenizer(train_pieces(folder)),
    }
    for kind, tokenizer in tokenizers.items():
      tokenize(path, kind, tokenizer)
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    prepared(path, tokenizers["sentencepiece"], **sizes)


if __name__ == "__main__":
  main()
