# SPDX-License-Identifier: Apache-2.0
"""The packing against a reference that walks over the documents token by token."""

import collections

import numpy as np
import pytest

from paxlike.data import packing
from paxlike.data.corpus import Corpus
from paxlike.data.dataset import Arrays
from paxlike.data.packing import PackedRows
from paxlike.data.token_index import TokenIndex
from paxlike.data.tokenizers.tokenizer import Tokenizer

BOS, EOS = 1000, 70_000  # The ids of documents are uint16.


class Marks(Tokenizer):
  """Only the ids of the markers."""

  vocab_size = 70_001

  def __init__(self, bos_id: int | None, eos_id: int | None):
    self.bos_id, self.eos_id = bos_id, eos_id

  def encode(self, text):
    raise NotImplementedError

  def decode(self, ids):
    raise NotImplementedError

  def fingerprint(self):
    return "marks"


class Counted(Corpus):
  """Documents of distinct tokens: 0, 1, 2, ... from the first to the last."""

  def __init__(self, lengths: list[int], marks: Marks):
    self.lengths = lengths
    self._marks = marks

  @property
  def tokenizer(self) -> Marks:
    return self._marks

  def index(self) -> TokenIndex:
    offsets = np.cumsum([0, *self.lengths], dtype=np.int64)
    return TokenIndex(np.arange(offsets[-1]).astype(np.uint16), offsets)


class Documents(PackedRows):
  """Rows of such documents."""

  def __init__(self, lengths: list[int], *, marks=(None, None), seq_len: int = 5, **options):
    super().__init__(corpus=Counted(lengths, Marks(*marks)), seq_len=seq_len, **options)
    self.lengths = lengths

  def all(self, epoch: int = 0) -> Arrays:
    return self.rows(epoch, np.arange(self.num_rows(epoch)))

  def document_of(self) -> dict[int, int]:
    starts = np.cumsum([0, *self.lengths])
    return {t: d for d in range(len(self.lengths)) for t in range(starts[d], starts[d + 1])}


def reference(dataset: Documents, *, packed: bool) -> Arrays:
  """What unshuffled rows are."""
  stream, token = [], 0
  assert dataset.tokenizer is not None
  bos, eos = dataset.tokenizer.bos_id, dataset.tokenizer.eos_id
  for number, length in enumerate(length for length in dataset.lengths if length):
    ids = [bos, *range(token, token + length), eos]
    stream += [(number, id_) for id_ in ids if id_ is not None]
    token += length
  rows = collections.defaultdict(list)
  for start in range(0, len(stream) - 1, dataset.seq_len):
    segment, position, last = 1, 0, stream[start][0]
    row = collections.defaultdict(list)
    for place in range(start, min(start + dataset.seq_len, len(stream))):
      if packed and stream[place][0] != last:
        segment, position, last = segment + 1, 0, stream[place][0]
      target = stream[place + 1] if place + 1 < len(stream) else None
      row["inputs"].append(stream[place][1])
      row["targets"].append(target[1] if target else None)
      row["weights"].append(target is not None and not (packed and target[0] != last))
      row["segments"].append(segment)
      row["positions"].append(position)
      position += 1
    for name, values in row.items():
      fill = None if name in ("inputs", "targets") else 0  # What stands there is of no matter.
      rows[name].append(values + [fill] * (dataset.seq_len - len(values)))
  names = ["inputs", "targets", "weights", *(["segments", "positions"] if packed else [])]
  return {name: np.array(rows[name]) for name in names}


LENGTHS = {
  "short": [3, 1, 4, 1, 5, 9, 2, 6],
  "ones": [1] * 11,
  "long": [23],
  "with empty ones": [0, 4, 0, 0, 7, 0],
  "exact rows": [5, 5, 6],
}
MARKS = {"none": (None, None), "eos": (None, EOS), "bos": (BOS, None), "both": (BOS, EOS)}
every_length = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
every_mark = pytest.mark.parametrize("marks", MARKS.values(), ids=MARKS)
both_packings = pytest.mark.parametrize("packed", [True, False], ids=["packed", "run on"])


@every_length
@every_mark
@both_packings
@pytest.mark.parametrize("seq_len", [1, 4, 5, 40])
@pytest.mark.parametrize("long", [1, 192], ids=["copied", "gathered"])
def test_rows_are_those_of_the_reference(lengths, marks, packed, seq_len, long, monkeypatch):
  monkeypatch.setattr(packing, "_LONG", long)
  dataset = Documents(lengths, marks=marks, packed=packed, shuffle=False, seq_len=seq_len)
  found, expected = dataset.all(), reference(dataset, packed=packed)
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == (np.float32 if name == "weights" else np.int32)
    assert found[name].shape == array.shape == (dataset.num_rows(0), seq_len)
    matters = array != None  # noqa: E711 - element by element.
    np.testing.assert_array_equal(found[name][matters], array[matters].astype(float), name)


@every_length
@both_packings
def test_any_rows_in_any_order_are_the_same_rows(lengths, packed):
  dataset = Documents(lengths, marks=(None, EOS), packed=packed, seed=3)
  random = np.random.default_rng(0)
  for epoch in (5, 0, 1):
    whole = dataset.all(epoch)
    numbers = random.integers(dataset.num_rows(epoch), size=9)
    for name, array in dataset.rows(epoch, numbers).items():
      np.testing.assert_array_equal(array, whole[name][numbers])
    assert all(array.shape == (0, 5) for array in dataset.rows(epoch, numbers[:0]).values())


@every_length
@every_mark
def test_every_token_is_a_target_once_an_epoch(lengths, marks):
  tokens = collections.Counter(range(sum(lengths)))
  num_documents = sum(length > 0 for length in lengths)
  tokens.update({mark: num_documents for mark in marks if mark is not None})
  straight = Documents(lengths, marks=marks, packed=False, shuffle=False)
  first = straight.all()["inputs"][0, 0]
  assert targets(straight.all()) == tokens - collections.Counter([int(first)])
  shuffled = Documents(lengths, marks=marks, packed=False, seed=1)
  for epoch in range(4):
    left = tokens - targets(shuffled.all(epoch))
    assert left.total() == 1  # That with which the stream begins.
    assert targets(shuffled.all(epoch)) + left == tokens


def targets(arrays: Arrays) -> collections.Counter[int]:
  return collections.Counter(arrays["targets"][arrays["weights"] > 0].tolist())


@every_length
@pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "straight"])
def test_packed_rows_keep_documents_apart(lengths, shuffle):
  """Without markers each token says which document it is of, and which token follows."""
  dataset = Documents(lengths, packed=True, shuffle=shuffle, seq_len=7)
  document_of = dataset.document_of()
  for epoch in range(3):
    arrays = dataset.all(epoch)
    counted = 0
    for row in range(dataset.num_rows(epoch)):
      inputs, next_, weights, segments, positions = (arrays[name][row] for name in FIELDS)
      real = segments > 0
      assert real[0] and (np.diff(real.astype(int)) <= 0).all()  # Padding is at the end.
      assert not positions[~real].any() and not weights[~real].any()
      assert segments[0] == 1 and set(np.diff(segments[real])) <= {0, 1}
      for column in np.flatnonzero(real):
        begins = column == 0 or segments[column] != segments[column - 1]
        assert positions[column] == (0 if begins else positions[column - 1] + 1)
        if not begins:  # A segment is a piece of one document, in its order.
          assert inputs[column] == inputs[column - 1] + 1
          assert document_of[inputs[column]] == document_of[inputs[column - 1]]
        elif column:
          assert not weights[column - 1]
        if weights[column]:
          assert next_[column] == inputs[column] + 1
          assert document_of[next_[column]] == document_of[inputs[column]]
          counted += 1
    # A document's first token is no target, nor that with which the shuffled stream begins.
    most = sum(max(length - 1, 0) for length in lengths)
    assert most - shuffle <= counted <= most


FIELDS = ("inputs", "targets", "weights", "segments", "positions")


def test_epochs_and_seeds_differ_and_repeat():
  lengths = [11, 3, 8, 20, 1, 7]
  one = Documents(lengths, seed=7, marks=(None, EOS))
  orders = [one.all(epoch)["inputs"].tolist() for epoch in range(4)]
  assert all(left != right for left in orders for right in orders if left is not right)
  again = Documents(lengths, seed=7, marks=(None, EOS))
  assert [again.all(epoch)["inputs"].tolist() for epoch in range(4)] == orders
  assert Documents(lengths, seed=8, marks=(None, EOS)).all()["inputs"].tolist() != orders[0]
  straight = Documents(lengths, shuffle=False)
  assert straight.all(0)["inputs"].tolist() == straight.all(3)["inputs"].tolist()


def test_one_long_document_is_cut_elsewhere_in_every_epoch():
  dataset = Documents([1000], seq_len=50)
  cuts = [frozenset(dataset.all(epoch)["inputs"][:, 0] % 50) for epoch in range(5)]
  assert len(set(cuts)) == 5


@pytest.mark.parametrize("lengths", [[100], [30, 1, 50, 7, 0, 12]], ids=["one", "several"])
@pytest.mark.parametrize("share", [0.9, 0.5, 0.33])
def test_splits_share_the_tokens_out(lengths, share):
  tokens = []
  for split in ((0.0, share), (share, 1.0)):
    arrays = Documents(lengths, split=split, shuffle=False, marks=(BOS, None), packed=False).all()
    tokens.append({token for token in targets(arrays) if token < BOS})
  assert len(tokens[0]) == int(share * 100)
  assert not tokens[0] & tokens[1] and tokens[0] | tokens[1] == set(range(100))


def test_fingerprint_tells_what_changes_the_rows():
  options = [{}, {"seed": 1}, {"packed": False}, {"shuffle": False}, {"seq_len": 6}]
  options += [{"split": (0.0, 0.5)}]
  found = [Documents([40, 3], **option).fingerprint() for option in options]
  found += [Documents([41, 3]).fingerprint(), Documents([3, 40]).fingerprint()]
  assert len(set(found)) == len(found)
  assert Documents([40, 3]).fingerprint() == found[0]


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_too_little_text_makes_no_row(lengths):
  assert Documents(lengths).num_rows(0) == 0


@both_packings
@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_resume_is_exact_across_epochs(packed, batch_size):
  def take(count: int, **options):
    dataset = Documents([11, 3, 8, 20, 1, 7], marks=(None, EOS), packed=packed, seed=2)
    with dataset.batches(batch_size, **options) as batches:
      return [next(batches) for _ in range(count)]

  whole = take(25)
  assert whole[-1].state["epoch"] >= 2
  for done in range(1, 25, 5):
    for left, right in zip(take(25 - done, state=whole[done - 1].state), whole[done:], strict=True):
      assert left.state == right.state and left.arrays.keys() == right.arrays.keys()
      for name, array in left.arrays.items():
        np.testing.assert_array_equal(array, right.arrays[name])
