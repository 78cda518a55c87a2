# SPDX-License-Identifier: Apache-2.0
"""Measures the data pipeline, and beside it those of Hugging Face and of Grain.

    python benchmarks/data.py [--megabytes=8] [--seq_len=1024] [--batch_size=32] [--repeats=3]

prints one JSON line for each case and side: paxlike and `datasets` take turns, and medians are
shown. CPU-seconds are of all threads. The text is that of the standard library's sources, as
.jsonl.

`tokenize` reads it, turns it into ids with the same tokenizer and writes them. The `datasets` side
has paxlike's encoder; of SentencePiece, `tokenizers` is Hugging Face's own encoder. `pack`, for
`datasets` alone, concatenates documents and cuts them into rows, once. `prepared` is shuffled
batches of inputs, targets and weights: of paxlike from its index, by a thread of its own, which
also packs; of `datasets` from those rows, over a shuffled index (`shuffle`) or from rows written
in that order (`flatten_indices`), as numpy; of `grain` from those rows as one array in memory,
shuffled, by a thread of its own.
"""

import argparse
import collections
import itertools
import json
import os
import pathlib
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import datasets
import grain
import numpy as np

from paxlike.convert import sentencepiece_json
from paxlike.data.packing import PackedRows
from paxlike.data.text.text_files import TextFiles
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer

NUM_PIECES = 4096

EncodeAll = Callable[[list[str]], Any]


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

  path = folder / "tokenizer.model"
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


def own_encoder(model: pathlib.Path) -> EncodeAll:
  """Returns Hugging Face's encoder of a SentencePiece model, whose `tokenizer.json` it writes."""
  import tokenizers

  sentencepiece_json.write(model, max_len=1024)
  encoder = tokenizers.Tokenizer.from_file(str(model.with_name("tokenizer.json")))
  return lambda texts: [one.ids for one in encoder.encode_batch(texts, add_special_tokens=False)]


class Theirs:
  """The same work as `datasets` does it.

  `packed` is of rows of `seq_len` + 1 tokens, made of documents with their BOS and EOS; the last
  of them that fill no row are dropped.
  """

  def __init__(self, path: pathlib.Path, tokenizer: Tokenizer):
    self._path, self._tokenizer = path, tokenizer

  def tokenize(self, folder: pathlib.Path, encode_all: EncodeAll | None = None) -> datasets.Dataset:
    """Returns the documents as `ids`, by the tokenizer or by `encode_all`."""
    encode_all = encode_all or self._tokenizer.encode_all

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
      return {"ids": encode_all(batch["text"])}

    files = {"train": str(self._path)}
    texts = datasets.load_dataset("json", data_files=files, cache_dir=str(folder), split="train")
    assert isinstance(texts, datasets.Dataset)
    return texts.map(encode, batched=True, remove_columns=["text"])

  def pack(self, documents: datasets.Dataset, seq_len: int) -> datasets.Dataset:
    """Returns rows that overlap by a token, as inputs and targets do."""
    before, after = (
      [] if marker is None else [np.array([marker], np.int32)]
      for marker in (self._tokenizer.bos_id, self._tokenizer.eos_id)
    )

    def cut(batch: dict[str, Any]) -> dict[str, list[np.ndarray]]:
      stream = np.concatenate([part for ids in batch["ids"] for part in (*before, ids, *after)])
      starts = range(0, len(stream) - seq_len, seq_len)
      return {"row": [stream[start : start + seq_len + 1] for start in starts]}

    return documents.with_format("numpy").map(cut, batched=True, remove_columns=["ids"])

  @staticmethod
  def batches(rows: datasets.Dataset, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches for ever."""
    while True:
      for batch in rows.with_format("numpy").iter(batch_size, drop_last_batch=True):
        yield shifted(batch["row"])  # pyright: ignore[reportCallIssue, reportArgumentType]


def shifted(rows: Any) -> dict[str, np.ndarray]:
  """Returns the batch of rows of `seq_len` + 1 tokens."""
  inputs, targets = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
  return {"inputs": inputs, "targets": targets, "weights": np.ones(inputs.shape, np.float32)}


def grain_batches(rows: np.ndarray, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
  """Returns batches for ever, as Grain makes them."""
  sequences: Any = grain.MapDataset.source(rows)  # pyright: ignore[reportArgumentType]
  batches = sequences.shuffle(seed=0).repeat().batch(batch_size, drop_remainder=True).map(shifted)
  one_thread = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
  return iter(batches.to_iter_dataset(one_thread))


class Took(NamedTuple):
  """Seconds of the clock, and of all threads."""

  seconds: float
  cpu_seconds: float


def timed(function: Callable[[], Any]) -> tuple[Took, Any]:
  """Returns what a call took, and what it returned."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = function()
  return Took(time.perf_counter() - wall, time.process_time() - cpu), result


def tokenize(path: pathlib.Path, name: str, tokenizer: Tokenizer, *, repeats: int):
  """Times reading text and writing ids."""
  folder = path.parent / "datasets"
  encoders: dict[str, EncodeAll | None] = {"datasets": None}
  if isinstance(tokenizer, SentencePieceTokenizer):
    encoders["datasets: tokenizers"] = own_encoder(tokenizer.path)
  times: dict[str, list[Took]] = collections.defaultdict(list)
  num_tokens = 0
  for _ in range(repeats):
    shutil.rmtree(path.parent / "cache", ignore_errors=True)
    source = data(path, tokenizer)
    took, index = timed(source.corpus.index)
    times["paxlike"].append(took)
    num_tokens = len(index.tokens)
    for side, encoder in encoders.items():
      shutil.rmtree(folder, ignore_errors=True)
      theirs = Theirs(path, tokenizer)
      took, documents = timed(lambda theirs=theirs, by=encoder: theirs.tokenize(folder, by))
      times[side].append(took)
      assert sum(map(len, documents.with_format("numpy")["ids"])) == num_tokens
  report("tokenize", num_tokens, times, tokenizer=name)


def prepared(
  path: pathlib.Path, tokenizer: Tokenizer, *, batch_size: int, seq_len: int, repeats: int
):
  """Times batches, with and without segments, which `datasets` does not have."""
  sizes = {"seq_len": seq_len, "batch_size": batch_size}
  theirs = Theirs(path, tokenizer)
  documents = theirs.tokenize(path.parent / "datasets")
  took, rows = timed(lambda: theirs.pack(documents, seq_len))
  report("pack", len(rows) * seq_len, {"datasets": [took]}, **sizes)
  shuffled = rows.shuffle(seed=0)
  kinds = {"datasets: shuffle": shuffled, "datasets: flatten_indices": shuffled.flatten_indices()}
  num_batches = max(10_000_000 // (batch_size * seq_len), 8)
  array: Any = rows.with_format("numpy")["row"][:]
  times: dict[str, list[Took]] = collections.defaultdict(list)
  for _ in range(repeats):
    for packed in (True, False):
      source = data(path, tokenizer, packed=packed, seq_len=seq_len)
      with source.batches(batch_size) as batches:
        side = "paxlike: packed" if packed else "paxlike: unpacked"
        times[side].append(drain(batches, num_batches))
    for side, ordered in kinds.items():
      times[side].append(drain(theirs.batches(ordered, batch_size), num_batches))
    times["grain"].append(drain(grain_batches(array, batch_size), num_batches))
  report("prepared", num_batches * batch_size * seq_len, times, **sizes)


def drain(batches: Iterator[Any], num_batches: int) -> Took:
  """Returns what so many batches take after the first, which opens files."""
  next(batches)
  taken = itertools.islice(batches, num_batches)
  return timed(lambda: collections.deque(taken, maxlen=0))[0]


def report(case: str, num_tokens: int, times: dict[str, list[Took]], **options: str | int):
  """Prints a line for each side."""
  for side, taken in times.items():
    seconds, cpu_seconds = (statistics.median(column) for column in zip(*taken, strict=True))
    values = {
      "case": case,
      "side": side,
      **options,
      "tokens": num_tokens,
      "seconds": round(seconds, 4),
      "cpu_seconds": round(cpu_seconds, 4),
      "tokens_per_second": round(num_tokens / seconds),
      "tokens_per_cpu_second": round(num_tokens / cpu_seconds),
    }
    print(json.dumps(values), flush=True)


def main():
  parser = argparse.ArgumentParser(description="Measures the data pipeline.")
  parser.add_argument("--megabytes", type=float, default=8, help="of text")
  parser.add_argument("--seq_len", type=int, default=1024)
  parser.add_argument("--batch_size", type=int, default=32)
  parser.add_argument("--repeats", type=int, default=3)
  options = parser.parse_args()
  datasets.disable_progress_bars()
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
      tokenize(path, kind, tokenizer, repeats=options.repeats)
    sizes = {"batch_size": options.batch_size, "seq_len": options.seq_len}
    prepared(path, tokenizers["sentencepiece"], repeats=options.repeats, **sizes)


if __name__ == "__main__":
  main()
