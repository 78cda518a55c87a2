# SPDX-License-Identifier: Apache-2.0
"""Damages small files of other programs at random, and reads them as paxlike does.

Each is read, or refused by a UserError in one line; anything else fails:

    PYTHONPATH=.:tests python -m helpers.damaged_files 500
"""

import collections
import contextlib
import gzip
import io
import json
import pathlib
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from helpers import tiny_llama
from paxlike.convert.main import run
from paxlike.convert.meta import MetaFolder
from paxlike.convert.safetensors_files import TensorFolder
from paxlike.data.chat import templates
from paxlike.data.text import records
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from paxlike.data.tuning.conversations import Conversations
from paxlike.errors import UserError

SECONDS = 20  # After so long a file counts as one that hangs.
TALK = [{"role": "user", "content": "t1 t2"}, {"role": "assistant", "content": "t3"}]


class Format(NamedTuple):
  """A kind of files.

  Attributes:
    write: Writes a valid folder.
    names: The files of it that are damaged, each in turn.
    read: Reads the folder; raises a UserError if it cannot be.
  """

  write: Callable[[pathlib.Path], object]
  names: tuple[str, ...]
  read: Callable[[pathlib.Path], object]


def torch_file(path: pathlib.Path, arrays: dict[str, np.ndarray], *, compressed: bool = False):
  """Writes arrays as `torch.save` does, without torch."""

  rebuild = _Global("torch._utils", "_rebuild_tensor_v2")
  listed = {}
  for number, (name, array) in enumerate(arrays.items()):
    strides = tuple(stride // array.itemsize for stride in array.strides)
    arguments = (_Storage(str(number), array.size), 0, array.shape, strides, False, {})
    listed[name] = _Call(rebuild, arguments)
  content = io.BytesIO()
  _Pickler(content, 2).dump(listed)
  method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
  with zipfile.ZipFile(path, "w", method) as archive:
    archive.writestr("archive/data.pkl", content.getvalue())
    archive.writestr("archive/version", "3\n")
    for number, array in enumerate(arrays.values()):
      archive.writestr(f"archive/data/{number}", array.astype(np.float32).tobytes())


class _Storage(NamedTuple):
  key: str
  size: int


class _Global(NamedTuple):
  module: str
  name: str


class _Call:
  def __init__(self, function: _Global, arguments: tuple[Any, ...]):
    self.function, self.arguments = function, arguments


_Python: Any = vars(pickle)["_Pickler"]  # That in C can write no names of what is not there.


class _Pickler(_Python):
  def persistent_id(self, obj: Any) -> Any:
    if isinstance(obj, _Storage):
      return ("storage", _Global("torch", "FloatStorage"), obj.key, "cpu", obj.size)
    return None

  def save(self, obj: Any, save_persistent_id: bool = True):
    if isinstance(obj, _Global):
      self.write(f"c{obj.module}\n{obj.name}\n".encode())
    elif isinstance(obj, _Call):
      self.save(obj.function)
      self.save(obj.arguments)
      self.write(b"R")
    else:
      super().save(obj, save_persistent_id)


def write_meta(folder: pathlib.Path):
  """Writes a small model as Meta does."""
  tiny = tiny_llama
  folder.mkdir(parents=True, exist_ok=True)
  inner = {"attention.wq": (16, 16), "attention.wk": (8, 16), "attention.wv": (8, 16)}
  inner |= {"attention.wo": (16, 16), "feed_forward.w1": (24, 16), "feed_forward.w2": (16, 24)}
  inner |= {"feed_forward.w3": (24, 16), "attention_norm": (16,), "ffn_norm": (16,)}
  outer = {"tok_embeddings.weight": (64, 16), "norm.weight": (16,), "output.weight": (64, 16)}
  layers: dict[str, tuple[int, ...]]
  layers = {f"layers.{i}.{n}.weight": s for i in range(tiny.LAYERS) for n, s in inner.items()}
  torch_file(folder / "consolidated.00.pth", tiny.values({**outer, **layers}))
  params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5}
  (folder / "params.json").write_text(json.dumps({**params, "rope_theta": 5e5}))


def write_tokenizer(folder: pathlib.Path):
  """Writes a `tokenizer.json`, what is beside it, and a template."""
  import tokenizers

  folder.mkdir(parents=True, exist_ok=True)
  words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{index}": index for index in range(3, 40)}
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
  model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  model.add_special_tokens(["<s>", "</s>"])
  model.post_processor = tokenizers.processors.TemplateProcessing(
    single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
  )
  model.save(str(folder / "tokenizer.json"))
  source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
  told = {"eos_token": {"content": "</s>", "special": True}, "chat_template": source}
  (folder / "tokenizer_config.json").write_text(json.dumps(told))


def write_sentencepiece(folder: pathlib.Path):
  """Writes a `tokenizer.model`."""
  import sentencepiece

  folder.mkdir(parents=True, exist_ok=True)
  lines = [f"{i} bottles of beer on the wall, {i * i} bottles" for i in range(200)]
  with open(folder / "tokenizer.model", "wb") as model:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(lines), model_writer=model, vocab_size=40, minloglevel=2
    )


def write_records(folder: pathlib.Path):
  """Writes the same conversations in all formats."""
  import pyarrow
  import pyarrow.parquet

  folder.mkdir(parents=True, exist_ok=True)
  said = [{"messages": TALK}, {"prompt": "a", "completion": "b"}]
  said += [{"instruction": "x", "input": "y", "output": "z"}] * 3
  lines = "".join(json.dumps(record) + "\n" for record in said).encode()
  (folder / "a.jsonl").write_bytes(lines)
  (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
  with pyarrow.output_stream(str(folder / "a.jsonl.zst"), compression="zstd") as stream:
    stream.write(lines)
  table = pyarrow.table({"prompt": ["a", "b"] * 9, "completion": ["c", "d"] * 9})
  pyarrow.parquet.write_table(table, folder / "a.parquet")
  with pyarrow.ipc.new_file(str(folder / "a.arrow"), table.schema) as writer:
    writer.write_table(table)


def _convert(kind: str, folder: pathlib.Path):
  """Runs paxlike-convert without writing, and raises the UserError of which it prints a line."""
  errors, out = io.StringIO(), io.StringIO()
  with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(out):
    status = run([f"--from={kind}", f"--path={folder}", "--to=unused", "--dry_run"])
  said = errors.getvalue()
  if status:
    assert status == 2 and said.startswith("paxlike-convert: ") and said.count("\n") == 1, said
    raise UserError(said)


def _hugging_face(folder: pathlib.Path):
  _convert("hf", folder)
  tensors = TensorFolder(folder)
  for name in tensors.specs:
    np.array(tensors.read(name))


def _meta(folder: pathlib.Path):
  _convert("meta", folder)
  tensors = MetaFolder(folder)
  for name in tensors.specs:
    np.array(tensors.read(name))


def _tokenizer(tokenizer: Tokenizer):
  tokenizer.check(10**6)
  _ = tokenizer.eos_id, tokenizer.bos_id, tokenizer.fingerprint()
  ids = tokenizer.encode("9 bottles t3 t4 \U0001f600")
  tokenizer.decode(np.concatenate([ids, np.arange(5)]))


def _records(folder: pathlib.Path):
  for path in sorted(folder.glob("a.*")):
    corpus = Conversations(path=str(path), tokenizer=ByteTokenizer(), vocab_size=300)
    try:
      for place, record in records.read(str(path), corpus.fields):
        for messages in corpus.messages(place, record):
          corpus.document(messages)
    except (OSError, EOFError, UnicodeDecodeError) as error:  # As `Conversations` does.
      raise UserError(f"{path} cannot be read: {error}.") from error


FORMATS = {
  "safetensors": Format(tiny_llama.write, ("model.safetensors",), _hugging_face),
  "config.json": Format(tiny_llama.write, ("config.json",), _hugging_face),
  "pth": Format(write_meta, ("consolidated.00.pth", "params.json"), _meta),
  "tokenizer.model": Format(
    write_sentencepiece,
    ("tokenizer.model",),
    lambda folder: _tokenizer(SentencePieceTokenizer(folder / "tokenizer.model")),
  ),
  "tokenizer.json": Format(
    write_tokenizer,
    ("tokenizer.json", "tokenizer_config.json"),
    lambda folder: _tokenizer(HuggingFaceTokenizer(folder / "tokenizer.json")),
  ),
  "chat template": Format(
    write_tokenizer,
    ("tokenizer_config.json",),
    lambda folder: templates.template("tokenizer", vocab_path=str(folder / "tokenizer.json"))(TALK),
  ),
  "records": Format(
    write_records,
    ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"),
    _records,
  ),
}

# What stands for a value of JSON; among it numbers that are no sizes.
ODD: tuple[Any, ...] = (
  None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, 0.5, -1e308, 1e309, float("nan"), "", "x\ny",
  "\ud800", [], [[]], [1, "a"], {}, {"a": 1},
)  # fmt: skip


def swapped(value: Any, source: random.Random) -> Any:
  """Returns a value of JSON in which one place has something else, or is gone."""
  if isinstance(value, dict | list) and value and source.random() < 0.9:
    copy: Any = value.copy()
    place = source.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    if source.random() < 0.1:
      del copy[place]
    else:
      copy[place] = swapped(copy[place], source)
    return copy
  return source.choice(ODD)


def damaged(content: bytes, source: random.Random) -> bytes:
  """Returns a file's content with a random damage."""
  kind = source.choice(("flip", "flip", "cut", "bytes", "json", "json", "repeat"))
  place = source.randrange(len(content))
  if source.random() < 0.5:
    place = source.randrange(min(len(content), 2000))  # Headers come first.
  if kind == "flip":
    changed = bytearray(content)
    for _ in range(source.choice((1, 1, 4))):
      changed[place] ^= 1 << source.randrange(8)
      place = source.randrange(len(content))
    return bytes(changed)
  if kind == "cut":
    return content[:place]
  if kind == "repeat":
    return content[: place + 50] + content[place:]
  if kind == "json":
    with contextlib.suppress(ValueError):
      return _swapped_in(content, source)
  return content[:place] + source.randbytes(8) + content[place + 8 :]


def _swapped_in(content: bytes, source: random.Random) -> bytes:
  """Swaps in what is JSON: all of a file, one of its lines, or the header of tensors."""
  size = int.from_bytes(content[:8], "little")
  if 0 < size < len(content) - 8:
    header = json.dumps(swapped(json.loads(content[8 : 8 + size]), source)).encode()
    return len(header).to_bytes(8, "little") + header + content[8 + size :]
  lines = content.splitlines(keepends=True)
  with contextlib.suppress(ValueError):
    number = source.randrange(len(lines))
    lines[number] = json.dumps(swapped(json.loads(lines[number]), source)).encode() + b"\n"
    return b"".join(lines)
  return json.dumps(swapped(json.loads(content), source)).encode()


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
  """Context of what must end in time."""

  def late(*unused: object):
    raise AssertionError(f"took more than {seconds} seconds")

  previous = signal.signal(signal.SIGALRM, late)
  signal.alarm(seconds)
  try:
    yield
  finally:
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def campaign(name: str, folder: pathlib.Path, *, count: int, seed: int) -> dict[str, int]:
  """Damages a format `count` times in a folder that is not there.

  Returns:
    How many files were "refused", and how many were "read", as they may be: a flipped bit of a
    weight is another weight.

  Raises:
    AssertionError: One did something else; the message says which, and how to make it again.
  """
  write, names, read = FORMATS[name]
  write(folder)
  whole = {each: (folder / each).read_bytes() for each in names}
  read(folder)
  counts = collections.Counter(refused=0, read=0)
  for number in range(count):
    source = random.Random(f"{name} {seed} {number}")
    file = names[number % len(names)]
    (folder / file).write_bytes(damaged(whole[file], source))
    try:
      with within(SECONDS):
        read(folder)
      counts["read"] += 1
    except UserError:
      counts["refused"] += 1
    except BaseException as error:
      raise AssertionError(f"{name}, seed {seed}, number {number}, {file}: {error!r}") from error
    (folder / file).write_bytes(whole[file])
  shutil.rmtree(folder)
  return dict(counts)


def main(count: int, seed: int):
  """Runs all formats and prints what came of them."""
  for name in FORMATS:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
      found = campaign(name, pathlib.Path(scratch) / "damaged", count=count, seed=seed)
    print(f"{name}: {found}, {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
  main(*map(int, [*sys.argv[1:], "1"][:2]))
