# SPDX-License-Identifier: Apache-2.0
"""`Model.generate` answers conversations as `--mode=decode` does, and refuses other mappings."""

import json

import pytest

import paxlike
from paxlike import main

pytestmark = pytest.mark.slow

TALK = [{"role": "user", "content": "3 b"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "3 bottles"}]


@pytest.fixture(scope="module")
def chat(tiny, tmp_path_factory):
  """The model of a run on conversations, whose class is local to a function."""

  class TinyChat(paxlike.datasets.Jsonl, tiny):
    MAX_SEQ_LEN = 128
    CHAT_TEMPLATE = "chatml"

  folder = tmp_path_factory.mktemp("chat")
  (folder / "a.jsonl").write_text("\n".join([json.dumps({"messages": ANSWERED})] * 40))
  path = str(folder / "a.jsonl")
  return paxlike.train(TinyChat, folder / "run", DATA_PATH=path, MAX_STEPS=1).load()


def test_a_conversation_is_answered_as_the_command_does(chat, tmp_path):
  (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TALK}))
  flags = (f"--prompt_file={tmp_path / 'a.jsonl'}", "--max_new_tokens=6")
  assert main.main(["", "--mode=decode", *flags, f"--job_log_dir={chat.folder}"]) == 0
  (line,) = (chat.folder / "decode_out" / "decode_00000001.jsonl").read_text().splitlines()
  answer = json.loads(line)["text"]
  assert chat.generate({"messages": TALK}, max_new_tokens=6) == answer
  assert chat.generate(TALK, max_new_tokens=6) == answer
  assert chat.generate([TALK, {"messages": tuple(TALK)}], max_new_tokens=6) == [answer, answer]
  assert chat.generate([TALK], max_new_tokens=6) == [answer]
  assert chat.generate(["3 b", TALK], max_new_tokens=6)[1] == answer


def test_an_answer_ends_where_the_template_ends_it(chat):
  chat.generate(TALK, max_new_tokens=2, stop="x")
  assert chat._decoding.options.stop == ("x", "<|im_end|>")
  chat.generate(TALK, max_new_tokens=2)
  assert chat._decoding.options.stop == ("<|im_end|>",)


@pytest.mark.parametrize(
  ("prompts", "says"),
  [
    ({"anything": 3}, r"the prompt: expected {'messages': \[...\]}, got {'anything': 3}"),
    ({"messages": "3 b"}, "the prompt: messages need a role and a content"),
    ([{"role": "user"}], "the prompt: messages need a role and a content"),
    ({"messages": ANSWERED}, "the prompt ends with an answer"),
    ([TALK, {"prompt": "3 b"}], "prompt 1: expected {'messages'"),
    ([TALK, [1, 2]], "prompt 1: messages need a role and a content"),
  ],
)
def test_other_mappings_are_refused(chat, prompts, says):
  with pytest.raises(paxlike.UserError, match=says) as error:
    chat.generate(prompts)
  assert "\n" not in str(error.value)


def test_without_a_template_the_knob_is_named(model, trained, monkeypatch, capsys):
  with pytest.raises(paxlike.UserError, match="set CHAT_TEMPLATE, a knob of experiments with"):
    model.generate(TALK)
  monkeypatch.setattr(paxlike.training.trainer.StateSource, "params", None)  # Nothing is loaded.
  assert main.main(["", "--mode=decode", "--chat", f"--job_log_dir={trained.folder}"]) == 2
  assert "this run has none: set CHAT_TEMPLATE" in capsys.readouterr().err
