# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers, in each of the forms that they come in."""

import json

import numpy as np
import pytest

from paxlike.data.tokenizers.tokenizer import ByteTokenizer
from paxlike.data.tuning.labeled_answers import LabeledAnswers, LabeledRows
from paxlike.data.tuning.preferences import PairRows, Preferences, ScoredPreferences
from paxlike.errors import UserError

USER = [{"role": "user", "content": "one and one is"}]
# Of which the answer is part of the prompt.
TALK = [{"role": "assistant", "content": "?"}, {"role": "user", "content": "?"}]
TWO, THREE = ([{"role": "assistant", "content": text}] for text in (" two", " three"))


def corpus(tmp_path, *rows, kind=Preferences):
  path = tmp_path / "pairs.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return kind(path=str(path), tokenizer=ByteTokenizer(), vocab_size=300)


@pytest.mark.parametrize(
  "row",
  [
    {"prompt": "one and one is", "chosen": " two", "rejected": " three"},
    {"prompt": USER, "chosen": TWO, "rejected": THREE},
    {"chosen": USER + TWO, "rejected": USER + THREE, "prompt": None},
    {"chosen": USER + TWO, "rejected": USER + THREE, "prompt": "one and one is"},
    {"chosen": USER + TWO, "rejected": USER + THREE, "prompt": USER},
    {"chosen": TWO, "rejected": THREE, "prompt": "one and one is"},
    {"chosen": TWO, "rejected": THREE, "prompt": USER + TALK},
    {"chosen": USER + TALK + TWO, "rejected": USER + TALK + THREE},
  ],
)
def test_a_row_has_the_preferred_answer_first(tmp_path, row):
  rows = PairRows(corpus=corpus(tmp_path, row), seq_len=64, shuffle=False)
  assert rows.num_rows(0) == 1
  arrays = rows.rows(0, np.array([0]))
  for segment, text in ((1, "one and one is two"), (2, "one and one is three")):
    here = arrays["segments"][0] == segment
    targets = arrays["targets"][0][here]
    shown = ByteTokenizer().decode(targets).replace("?", "")
    assert shown == text[1:]  # The first byte is only input.
    learnt = targets[arrays["weights"][0][here] > 0]
    assert ByteTokenizer().decode(learnt) == text.removeprefix("one and one is")
    assert arrays["positions"][0][here].tolist() == list(range(here.sum()))


def test_each_answer_has_half_a_row_and_pairs_stay_together(tmp_path):
  pairs = [{"prompt": str(i % 10), "chosen": "a" * i, "rejected": "b" * 9} for i in range(2, 60)]
  rows = PairRows(corpus=corpus(tmp_path, *pairs), seq_len=40, seed=1, split=(0.5, 1))
  assert rows.num_rows(0) == 29
  seen = set()
  for number in range(29):
    arrays = rows.rows(0, np.array([number]))
    counts = np.bincount(arrays["segments"][0], minlength=3)[1:]
    chosen = arrays["inputs"][0][arrays["segments"][0] == 1]
    rejected = arrays["inputs"][0][arrays["segments"][0] == 2]
    assert counts.max() <= 20 and chosen[0] == rejected[0]
    assert ord("b") not in chosen and ord("a") not in rejected
    seen.add(tuple(chosen))
  assert len(seen) > 5
  assert rows.fingerprint() != PairRows(corpus=corpus(tmp_path, *pairs), seq_len=40).fingerprint()


def test_pairs_of_which_one_answer_never_fits_are_refused(tmp_path):
  pairs = [{"prompt": "1", "chosen": "a", "rejected": "b" * 30}] * 3
  rows = PairRows(corpus=corpus(tmp_path, *pairs, kind=ScoredPreferences), seq_len=40)
  with pytest.raises(UserError, match="half of MAX_SEQ_LEN=40 truncates an answer of each pair"):
    rows.batches(1)
  PairRows(corpus=corpus(tmp_path, *pairs), seq_len=40).batches(1).close()


def test_what_is_no_pair_is_said(tmp_path):
  for row, says in (
    ({"prompt": "a", "chosen": "b"}, "needs a role and a content"),
    (
      {"chosen": "b", "rejected": "c"},
      "no prompt, nor messages in chosen and rejected. It has: chosen",
    ),
    ({"chosen": [{"role": "user"}], "rejected": TWO}, "needs a role and a content"),
    ({"prompt": "a", "completion": "b", "label": True}, "answers are for PREFERENCE_LOSS=kto;"),
  ):
    with pytest.raises(UserError, match=says):
      corpus(tmp_path, row).index()


ASKED = {"prompt": USER + TALK, "completion": TWO}


def test_each_answer_is_labeled_by_its_segment(tmp_path):
  pair = {"prompt": "one and one is", "chosen": " two", "rejected": " three"}
  given = (ASKED | {"label": False}, pair, {"prompt": "a", "completion": "b", "label": True})
  rows = LabeledRows(corpus=corpus(tmp_path, *given, kind=LabeledAnswers), seq_len=30)
  arrays = rows.rows(0, np.arange(rows.num_rows(0)))
  found = set()
  for row in range(4):
    used = slice(0, (arrays["segments"][row] > 0).sum())
    targets, weights = arrays["targets"][row], arrays["weights"][row]
    (segment,) = np.unique(arrays["segments"][row][used])
    assert arrays["positions"][row][used].tolist() == list(range(used.stop))
    assert not arrays["segments"][row][used.stop :].any()
    found.add((ByteTokenizer().decode(targets[weights > 0]), int(segment)))
  assert found == {(" two", 2), (" two", 1), (" three", 2), ("b", 1)}
  assert set(rows.no_rows()) == set(arrays)


@pytest.mark.parametrize("row", [ASKED, ASKED | {"label": 1}, {"prompt": "a", "label": True}])
def test_what_is_no_labeled_answer_is_said(tmp_path, row):
  with pytest.raises(UserError, match="a label that is true or false, or else prompt, chosen"):
    corpus(tmp_path, row, kind=LabeledAnswers).index()
