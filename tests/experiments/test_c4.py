# SPDX-License-Identifier: Apache-2.0
"""C4, as TFDS has it or made from parquet: what was stopped goes on with the same batches."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
import sentencepiece
from helpers.program import curve, finish, start
from helpers.sources import REPOSITORY

pytestmark = pytest.mark.slow
KNOBS = {
  "MAX_SEQ_LEN": 128,
  "NUM_LAYERS": 1,
  "MODEL_DIMS": 16,
  "HIDDEN_DIMS": 32,
  "NUM_HEADS": 2,
  "DIMS_PER_HEAD": 8,
  "FPROP_DTYPE": "float32",
  "LR_COS_WARMUP": 1,
  "LR_COS_DECAY_START": 2,
  "LR_COS_DECAY_END": 9,
  "SUMMARY_INTERVAL_STEPS": 1,
  "EVAL_INTERVAL_STEPS": 0,
}


def made(folder: pathlib.Path) -> tuple[str, str, int]:
  """Returns a data set of parquet, a vocabulary and its size."""
  import pyarrow
  import pyarrow.parquet

  texts = [f"Text number {i} says {'more and ' * (i % 9)}no more." for i in range(300)]
  for split in ("train", "validation"):
    table = pyarrow.table({"text": texts, "url": texts})
    pyarrow.parquet.write_table(table, folder / f"c4-{split}-00000-of-00001.parquet")
  with (folder / "pieces.model").open("wb") as model:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts * 5),
      model_writer=model,
      vocab_size=100,
      model_type="bpe",
      byte_fallback=False,
      minloglevel=2,
      hard_vocab_limit=False,
    )
  size = sentencepiece.SentencePieceProcessor(str(folder / "pieces.model")).vocab_size()
  return str(folder), str(folder / "pieces.model"), size


def from_parquet(source: str, root: pathlib.Path) -> str:
  script = REPOSITORY / "scripts" / "download_c4.py"
  command = [sys.executable, script, f"--from={source}/*.parquet", f"--tfds_data_dir={root}"]
  subprocess.run(command, check=True, capture_output=True, env=os.environ | ENVIRONMENT)
  return str(root / "c4" / "en" / "3.0.1")


ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY)}


@pytest.fixture(params=["made", "shared TFRecord"])
def data(request, tmp_path):
  """Flags that name a data set and a vocabulary."""
  if request.param == "made":
    source, vocabulary, size = made(tmp_path)
    folder = from_parquet(source, tmp_path / "tfds")
  else:
    shared = request.getfixturevalue("shared_data")
    folder, size = str(shared / "c4"), 512
    vocabulary = str(shared / "stories260K" / "tokenizer.model")
  knobs = KNOBS | {"TFDS_NAME": folder, "VOCAB_PATH": vocabulary, "VOCAB_SIZE": size}
  return [f"--fdl.{name}={value}" for name, value in knobs.items()]


def train(folder, *flags, processes=1):
  """Trains with four sequences a step, on a device for each process."""
  if processes > 1:
    with socket.socket() as probe:
      probe.bind(("localhost", 0))
      address = f"--server_addr=localhost:{probe.getsockname()[1]}"
    flags += ("--multiprocess_gpu", address, f"--num_hosts={processes}")
    flags += ("--fdl.ICI_MESH_SHAPE=[1,1,1]", f"--fdl.DCN_MESH_SHAPE=[1,{processes},1]")
  flags += ("--fdl_config=C4Gpt126M", f"--job_log_dir={folder}")
  flags += (f"--fdl.PERCORE_BATCH_SIZE={4 // processes}",)
  hosts = [[f"--host_idx={index}"] for index in range(processes)] if processes > 1 else [[]]
  for process in [start(*flags, *host) for host in hosts]:
    status, _, err = finish(process)
    assert status == 0, err


def batches(folder):
  """What tells the batches of a run apart: the weights and the losses."""
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [(r["total_weights"], r["loss"]) for r in map(json.loads, lines) if r["kind"] == "train"]


def test_what_was_stopped_goes_on_with_the_same_batches_on_one_process_or_two(data, tmp_path):
  whole, parts = tmp_path / "whole", tmp_path / "parts"
  train(whole, *data, "--fdl.MAX_STEPS=6")
  train(parts, *data, "--fdl.MAX_STEPS=3")
  train(parts, *data, "--fdl.MAX_STEPS=6", processes=2)
  assert len(curve(parts)) == 6
  for found, expected in zip(batches(parts), batches(whole), strict=True):
    assert found == pytest.approx(expected, rel=1e-5)
  assert len(set(batches(whole))) == 6
