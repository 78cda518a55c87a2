# SPDX-License-Identifier: Apache-2.0
"""A mixture has the shares that it says, and each source in its own order."""

import itertools
import json

import numpy as np
import pytest
from helpers.program import TINY, curve, run
from helpers.rows import assert_described

from paxlike.data.dataset import Arrays, RowDataset
from paxlike.data.mixture import Mixture
from paxlike.data.packing import PackedRows
from paxlike.data.text.text_files import TextFiles
from paxlike.errors import UserError


class Numbered(RowDataset):
  """Rows that hold their epoch and number; epochs differ in length."""

  seq_len = 2

  def __init__(self, num_rows: int, **more):
    self._num_rows = num_rows
    self._more = more

  def fingerprint(self) -> str:
    return f"numbered {self._num_rows}"

  def num_rows(self, epoch: int) -> int:
    return self._num_rows + epoch % 2

  def rows(self, epoch: int, numbers: np.ndarray) -> Arrays:
    assert ((numbers >= 0) & (numbers < self.num_rows(epoch))).all()
    inputs = np.stack([np.full(len(numbers), epoch), numbers], 1).astype(np.int32)
    return {
      "inputs": inputs,
      "targets": inputs,
      "weights": np.ones((len(numbers), 2)),
      **self._more,
    }


def take(mixture, count, batch_size=7, **options):
  """Returns (source, epoch, number) of each row of so many batches."""
  rows = []
  with mixture.batches(batch_size, **options) as batches:
    for _ in range(count):
      arrays = next(batches).arrays
      rows += np.concatenate([arrays["source"], arrays["inputs"]], 1).tolist()
  return rows


def test_each_source_has_its_share_and_is_gone_through_in_order():
  mixture = Mixture(
    sources={"a": Numbered(5), "b": Numbered(50), "c": Numbered(3)},
    weights={"a": 5, "b": 3, "c": 0.01},
    seed=3,
  )
  rows = take(mixture, 1024)
  for source, (weight, size) in enumerate(((5, 5), (3, 50), (0.01, 3))):
    found = [(epoch, number) for at, epoch, number in rows if at == source]
    assert abs(len(found) - len(rows) * weight / 8.01) <= 1
    wanted = [(epoch, n) for epoch in range(2000) for n in range(size + epoch % 2)]
    # Within a block, random order.
    assert sorted(found) == wanted[: len(found)]
  order = [source for source, *_ in rows]
  changes = sum(one != other for one, other in itertools.pairwise(order))
  assert changes > len(order) / 4


def test_without_weights_each_row_is_as_likely():
  rows = take(Mixture(sources={"a": Numbered(30), "b": Numbered(10)}), 1024, 4)
  assert sum(source == 0 for source, *_ in rows) == len(rows) * 3 // 4


def test_it_goes_on_after_any_batch_on_any_number_of_hosts():
  def mixture():
    return Mixture(sources={"a": Numbered(5), "b": Numbered(50)}, weights={"a": 1, "b": 2})

  whole = take(mixture(), 400, 8)
  with mixture().batches(8) as batches:
    states = [next(batches).state for _ in range(150)]
  assert take(mixture(), 250, 8, state=json.loads(json.dumps(states[-1]))) == whole[150 * 8 :]
  halves = [take(mixture(), 400, 8, rows=np.arange(4) + 4 * host) for host in range(2)]
  joined = [np.array(half).reshape(400, 4, 3) for half in halves]
  assert np.concatenate(joined, 1).reshape(-1, 3).tolist() == whole


def test_it_describes_its_rows_with_their_source(tmp_path):
  texts = {name: PackedRows(corpus=characters(tmp_path, name), seq_len=2) for name in ("a", "b")}
  assert_described(Mixture(sources=texts))


def characters(tmp_path, name):
  path = tmp_path / f"{name}.txt"
  path.write_text(f"{name}x{name}")
  return TextFiles(path=str(path), tokenizer=None, vocab_size=9)


def test_what_does_not_mix_is_said(tmp_path):
  two = {"a": Numbered(5), "b": Numbered(5)}
  with pytest.raises(UserError, match="a mixture needs a source"):
    Mixture(sources={})
  with pytest.raises(UserError, match="MIXTURE_WEIGHTS names a, but the sources are a, b"):
    Mixture(sources=two, weights={"a": 1}).check()
  with pytest.raises(UserError, match="each must be positive"):
    Mixture(sources=two, weights={"a": 1, "b": 0}).check()
  texts = {name: PackedRows(corpus=characters(tmp_path, name), seq_len=2) for name in two}
  with pytest.raises(UserError, match="must share a tokenizer"):
    Mixture(sources=texts).check()
  with pytest.raises(UserError, match="a of the mixture: the data has no sequence"):
    Mixture(sources={"a": Numbered(0)}, weights={"a": 1}).batches(2)
  packed = Numbered(5, segments=np.ones((1, 2)))
  with pytest.raises(UserError, match="do not mix"):
    take(Mixture(sources={"a": Numbered(5), "b": packed}), 5)
  one = Mixture(sources=two).fingerprint()
  assert one != Mixture(sources=two, seed=1).fingerprint()
  assert one != Mixture(sources=two, weights={"a": 1, "b": 2}).fingerprint()


MIX = """
from paxlike.experiments import datasets, gpt

class Mix(datasets.TextMixture, gpt.Gpt126M):
  NUM_LAYERS = 1
  MODEL_DIMS = 16
  HIDDEN_DIMS = 32
  NUM_HEADS = 2
  DIMS_PER_HEAD = 8
"""


@pytest.mark.slow
def test_a_run_counts_the_tokens_of_each_source(tmp_path, monkeypatch):
  (tmp_path / "my_mix.py").write_text(MIX)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  for name in ("prose", "code"):
    (tmp_path / f"{name}.txt").write_text(f"{name} is what this is about. " * 200)
  paths = f"{{prose: {tmp_path}/prose.txt, code: {tmp_path}/code.txt}}"
  flags = [flag for flag in TINY if "fdl_config" not in flag and "VOCAB" not in flag]
  flags += ["--fdl_config=my_mix.Mix", f"--fdl.DATA_PATHS={paths}", "--fdl.VOCAB_SIZE=257"]
  flags += ["--fdl.MIXTURE_WEIGHTS={prose: 3, code: 1}", "--fdl.PERCORE_BATCH_SIZE=4"]
  flags += ["--fdl.MAX_STEPS=64", "--fdl.SUMMARY_INTERVAL_STEPS=10"]
  flags += ["--fdl.GRADIENT_ACCUMULATION_STEPS=2", f"--job_log_dir={tmp_path / 'run'}"]
  assert run(*flags) == 0
  assert len(curve(tmp_path / "run", "eval")) == 2
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
  counts = {name: sum(r[f"tokens/{name}"] for r in records) for name in ("prose", "code")}
  # 64 steps of 32 rows of 16 tokens are two blocks; where a text ends, one token has no weight.
  wanted = {"prose": 64 * 32 * 16 * 3 // 4, "code": 64 * 32 * 16 // 4}
  assert counts == pytest.approx(wanted, rel=0.005) and sum(counts.values()) <= 64 * 32 * 16
