# SPDX-License-Identifier: Apache-2.0
import itertools

import numpy as np
import pytest

from paxlike.data.seqio import python_corpus


def test_the_corpus_is_python_and_a_twentieth_is_held_out():
  sources = dict(python_corpus.sources())
  assert "dataclass" in sources["dataclasses.py"]
  assert not any("site-packages" in name or "test" in name.split("/") for name in sources)
  assert sum(map(len, sources.values())) > 5_000_000
  held_out = [name for name in sources if python_corpus._is_held_out(name)]
  assert 0.02 < len(held_out) / len(sources) < 0.1


def test_building_the_data_set_prepares_nothing(monkeypatch, tmp_path):
  monkeypatch.setenv("PAXLIKE_CACHE", str(tmp_path))
  dataset = python_corpus.dataset(split="train", seq_len=16, vocab_size=4096)
  dataset.check()
  assert dataset.seq_len == 16
  assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_whole_way_from_sources_to_tokens():
  """TFDS writes, SentencePiece trains, SeqIO reads: the tokens are those of our own tokenizer."""
  sources = dict(python_corpus.sources())
  dataset = python_corpus.dataset(split="validation", seq_len=64, vocab_size=4096)
  tokens, offsets, _ = dataset.corpus.index()
  tokenizer = dataset.tokenizer
  assert tokenizer is not None
  assert tokenizer.vocab_size == 4096
  got = {tokenizer.decode(tokens[a:b]) for a, b in itertools.pairwise(offsets)}
  expected = {text for name, text in sources.items() if python_corpus._is_held_out(name)}
  assert got == expected
  lengths = tokenizer.byte_lengths()
  assert lengths is not None
  assert lengths[tokens[:]].sum() == sum(len(text.encode()) for text in expected)
  for text in [*sorted(expected)[:5], "\tx = 'é∑🙂'\n\n  y\r\n"]:
    assert tokenizer.decode(tokenizer.encode(text)) == text
  longest = max(expected, key=len)
  assert len(longest) / len(tokenizer.encode(longest)) > 2.5
  with dataset.batches(4) as batches:
    arrays = next(batches).arrays
  assert arrays["segments"].max() >= 1
  assert not np.array_equal(arrays["inputs"], arrays["targets"])
