# SPDX-License-Identifier: Apache-2.0
"""Texts in, texts out: the laws of `Decoding` and of what is told of it."""

import json
import os
import types
from typing import Any, cast

import jax
import pytest
from etils import epath
from helpers.characters import Tokenizer
from helpers.tiny_model import SEQ_LEN, tiny

from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError
from paxlike.inference import decoding, prompts
from paxlike.inference.sampling import Sampling
from paxlike.training import train_state


class RunLog:
  def __init__(self):
    self.pieces, self.notes = [], []
    self.piece, self.note = self.pieces.append, self.notes.append


@pytest.fixture(scope="module")
def model():
  definition = tiny()
  mesh = MeshSpec(ici=(1, 1, 1)).build(jax.devices()[:1])
  return definition, train_state.init_params(definition, mesh, seed=1)


def make(model, tokenizer=None, **options):
  definition, params = model
  options = decoding.DecodingOptions(**options)
  return decoding.Decoding(
    definition, params, tokenizer or Tokenizer(), max_len=SEQ_LEN, options=options
  )


def texts(model, given, **options):
  """Returns the finished results, in the order of prompts and samples."""
  ended = [result for result in make(model, **options).run(given) if result.ended_by]
  return sorted(ended, key=lambda result: (result.prompt, result.sample))


def test_each_prompt_gets_its_samples(model):
  hot = Sampling(temperature=5.0)
  results = texts(model, ["ab", "c", "def"], num_samples=3, sampling=hot, max_new_tokens=6)
  assert [(r.prompt, r.sample) for r in results] == [(p, s) for p in range(3) for s in range(3)]
  for result in results:
    assert len(result.log_probabilities) == len(result.tokens)
  assert len({result.text for result in results}) > 6


@pytest.mark.slow
def test_a_text_ends_before_a_stop_string_or_token(model):
  (free,) = texts(model, ["ab"], max_new_tokens=8, sampling=Sampling(temperature=5.0))
  assert len(free.tokens) > 3
  stop = free.text[2:4]
  hot = Sampling(temperature=5.0)
  (stopped,) = texts(model, ["ab"], max_new_tokens=8, sampling=hot, stop=("never said", stop))
  assert (stopped.text, stopped.ended_by) == (free.text[: free.text.find(stop)], "stop")
  token = free.tokens[2]
  (stopped,) = texts(model, ["ab"], max_new_tokens=8, sampling=hot, stop_tokens=(token,))
  assert stopped.tokens == free.tokens[: free.tokens.index(token)]
  assert stopped.ended_by == "stop"


def test_a_text_ends_where_the_sequence_does(model):
  (result,) = texts(model, ["abcdefghij"], max_new_tokens=100)
  assert len(result.tokens) <= SEQ_LEN - 11
  with pytest.raises(UserError, match="leaves no room for new ones in 16"):
    texts(model, ["x" * SEQ_LEN])


def test_a_tokenizer_of_another_size_is_said(model):
  tokenizer = Tokenizer()
  tokenizer.vocab_size = 97
  with pytest.raises(UserError, match="the tokenizer has 97 ids, but the model has 96"):
    make(model, tokenizer)


@pytest.mark.parametrize("given", [["ab"], ["ab", "c"]])
def test_what_is_told_is_what_is_written(model, tmp_path, given):
  made = make(model, max_new_tokens=5, stop=("zz",))
  run_log, path = RunLog(), epath.Path(tmp_path) / "out" / "texts.jsonl"
  decoding.write_continuations(made, given, cast(Any, run_log), path)
  records = [json.loads(line) for line in path.read_text().splitlines()]
  assert sorted(record["prompt"] for record in records) == sorted(given)
  if len(given) == 1:
    assert "".join(run_log.pieces) == records[0]["prompt"] + records[0]["text"] + "\n"
  else:
    for record in records:
      assert any(
        repr(record["prompt"]) in note and record["text"] in note for note in run_log.notes
      )
  assert "tokens/s" in run_log.notes[-1]
  assert made.speed.prefill_tokens == sum(len(prompt) + 1 for prompt in given)


@pytest.mark.parametrize("stop", [(), ("xy",), ("a stop string longer than the text",)])
def test_a_text_is_printed_once_however_it_grows(tmp_path, stop):
  text = "hello there"

  def grow(prompts):
    del prompts
    for size in (1, 2, 5, 5, len(text)):
      ended_by = "length" if size == len(text) else None
      yield decoding.Continuation(
        prompt=0, sample=0, text=text[:size], tokens=[], log_probabilities=[], ended_by=ended_by
      )

  growing = types.SimpleNamespace(
    options=decoding.DecodingOptions(stop=stop), speed=decoding.Speed(), run=grow
  )
  run_log = RunLog()
  decoding.write_continuations(
    cast(Any, growing), ["Oh, "], cast(Any, run_log), epath.Path(tmp_path) / "texts.jsonl"
  )
  assert "".join(run_log.pieces) == "Oh, hello there\n"


def test_prompts_are_lines_or_a_field_of_json(tmp_path):
  (tmp_path / "a.txt").write_text("one\n\ntwo three\n")
  (tmp_path / "b.jsonl").write_text('{"prompt": "one\\ntwo"}\n{"prompt": "", "more": 1}\n')
  assert prompts.read(tmp_path / "a.txt") == ["one", "two three"]
  assert prompts.read(tmp_path / "b.jsonl") == ["one\ntwo", ""]


@pytest.mark.parametrize("line", ['{"text": "x"}', "[1]", "no json", '{"prompt": 3}'])
def test_a_line_without_a_prompt_is_named(tmp_path, line):
  (tmp_path / "b.jsonl").write_text('{"prompt": "fine"}\n' + line)
  with pytest.raises(UserError, match=r"b\.jsonl: line 2 has no string"):
    prompts.read(tmp_path / "b.jsonl")


@pytest.mark.parametrize(
  ("name", "says"),
  [
    ("nowhere.txt", "nowhere.txt cannot be read: No such file"),
    ("empty.txt", "empty.txt has no prompts"),
    ("empty.jsonl", "empty.jsonl has no prompts"),
    ("blank.txt", "blank.txt has no prompts"),
    ("pipe", "pipe is a pipe, not a file"),  # It would be waited for.
    (".", "is a folder, not a file"),
    ("bytes.txt", "bytes.txt is not UTF-8 text"),
  ],
)
def test_a_file_without_prompts_is_refused(tmp_path, name, says):
  os.mkfifo(tmp_path / "pipe")
  for empty, content in (("empty.txt", b""), ("empty.jsonl", b""), ("blank.txt", b"\n\n")):
    (tmp_path / empty).write_bytes(content)
  (tmp_path / "bytes.txt").write_bytes(b"\xff")
  with pytest.raises(UserError, match=f"^--prompt_file={tmp_path}.*{says}"):
    prompts.read(tmp_path / name)


def test_prompts_come_through_a_pipe_that_is_open():
  reader, writer = os.pipe()
  os.write(writer, b"one\ntwo\n")
  os.close(writer)
  assert prompts.read(f"/dev/fd/{reader}") == ["one", "two"]
  os.close(reader)


def test_a_stop_token_is_an_id_that_the_model_knows(model):
  make(model, stop_tokens=(95,))
  with pytest.raises(UserError, match=r"--stop_token=99999: the model's ids are below 96"):
    make(model, stop_tokens=(95, 99999))
