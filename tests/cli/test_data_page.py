# SPDX-License-Identifier: Apache-2.0
"""Printed sequences have the text, the loss and the segments of their arrays."""

import re

import numpy as np
import pytest

from paxlike.cli.data_page import BEGIN, END, Page, Summary
from paxlike.data.corpus import Corpus
from paxlike.data.examples import ExampleRows
from paxlike.data.packing import PackedRows
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import ByteTokenizer

TEXTS = ["one two", f"é 日本 {BEGIN}x{END}\n", "\x1b[31m!", "a", "three\tfour five six"]


class Texts(Corpus):
  """Documents; the later half of each has loss."""

  @property
  def tokenizer(self) -> ByteTokenizer:
    return ByteTokenizer()

  def index(self) -> TokenIndex:
    ids = [np.append(self.tokenizer.encode(text), 256) for text in TEXTS]
    weights = [np.arange(len(some)) >= len(some) // 2 for some in ids]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    columns = {"weights": np.concatenate(weights).astype(np.uint8)}
    return TokenIndex(np.concatenate(ids).astype(np.uint16), offsets, columns)


def escaped(text):
  return "".join(
    char if (char.isprintable() or char in "\n\t") and char not in (BEGIN, END)
    else char.encode("unicode_escape").decode()
    for char in text
  )  # fmt: skip


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("color", [True, False])
def test_examples_are_printed_with_what_has_loss(packed, color):
  data = ExampleRows(corpus=Texts(), seq_len=64, packed=packed, shuffle=False)
  page, count = Page(color=color), data.num_rows(0)
  arrays = data.rows(0, np.arange(count))
  shown = [
    page.sequence({name: rows[row] for name, rows in arrays.items()}, data, title="it")
    for row in range(count)
  ]
  if color:
    text = "\n".join(shown)
    assert f"\x1b[1;32m\x1b[4m<EOS>\x1b[0m" in text and "\x1b[31m" not in text  # noqa: F541
    return
  expected = []
  for text in TEXTS:
    ids = [*text.encode(), 256]
    first = max(len(ids) // 2, 1)  # The first token is only an input.
    head, tail = (bytes(ids[:first]), bytes(ids[first:-1]))
    halves = (escaped(half.decode("utf-8", "replace")) for half in (head, tail))
    expected.append("{}{}{}<EOS>{}".format(*(next(halves), BEGIN, next(halves), END)))
  found = [
    block.partition("\n")[2]
    for text in shown
    for block in (text.split("\n--- ")[1:] if packed else [text])
  ]
  assert sorted(found) == sorted(expected)


def test_a_summary_adds_up():
  for data in (
    ExampleRows(corpus=Texts(), seq_len=40),
    PackedRows(corpus=Texts(), seq_len=16, seed=3),
    PackedRows(corpus=Texts(), seq_len=16, seed=3, packed=False),
  ):
    arrays = data.rows(0, np.arange(data.num_rows(0)))
    summary = Summary()
    summary.add(arrays)
    loss = (arrays["weights"] > 0).sum()
    used = sum(summary._lengths)
    text = summary.text(data, kind="sequences")
    assert f"with loss: {loss / used:.1%}" in text
    (padding,) = re.findall(r"padding: ([\d.]+)%", text)
    assert float(padding) == pytest.approx(100 * (1 - used / arrays["inputs"].size), abs=0.06)
    assert used == sum(summary._segments) or not summary._segments
    assert ("truncated" in text) == isinstance(data, ExampleRows)
