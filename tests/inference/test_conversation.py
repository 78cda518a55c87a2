# SPDX-License-Identifier: Apache-2.0
"""A chat model answers conversations: of a file, and in the terminal."""

import json
import os
import pty
import subprocess
import sys

import pytest
from helpers import newcomer
from helpers.program import finish, start
from helpers.sources import REPOSITORY

from paxlike.convert.main import run as convert
from paxlike.data.chat import templates
from paxlike.data.chat.prompt_rendering import PromptRenderer, beside
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer
from paxlike.data.tuning.conversations import Conversations
from paxlike.errors import UserError
from paxlike.inference import prompts

TALK = [{"role": "user", "content": "t6"}]
ANSWERED = [*TALK, {"role": "assistant", "content": "t7"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  folder = tmp_path_factory.mktemp("home")
  newcomer.make(folder, "mine_talks")
  assert convert(["--from=hf", f"--path={folder / 'theirs'}", f"--to={folder / 'ours'}"]) == 0
  return folder


@pytest.mark.parametrize("name", [*templates.TEMPLATES, "tokenizer"])
def test_a_prompt_is_the_beginning_of_what_was_trained_on(home, name):
  path = str(home / "ours" / "tokenizer.json")
  tokenizer = ByteTokenizer() if name != "tokenizer" else HuggingFaceTokenizer(path)
  corpus = Conversations(
    path=None, tokenizer=tokenizer, vocab_size=300, template=name, vocab_path=path
  )
  whole = corpus.document(ANSWERED)
  prompt = corpus.prompt_renderer.tokens(TALK)
  first = int(whole["weights"].argmax())
  assert list(prompt) == list(whole["tokens"][:first]) and first > 0


def test_the_template_beside_a_tokenizer_serves_where_no_knob_names_one(home):
  found = beside(HuggingFaceTokenizer(home / "ours" / "tokenizer.json"))
  assert found is not None and found.turn_end == ((2,), ())
  assert beside(ByteTokenizer()) is None
  assert PromptRenderer("chatml", ByteTokenizer(), vocab_path=None).turn_end == (
    (),
    ("<|im_end|>",),
  )


@pytest.mark.parametrize(
  ("line", "says"),
  [
    ('{"messages": "x"}', "messages need a role and a content"),
    (json.dumps({"messages": ANSWERED}), "ends with an answer"),
    ("{}", "no conversation in 'messages'"),
  ],
)
def test_a_conversation_that_cannot_be_answered_is_named(tmp_path, line, says):
  (tmp_path / "a.jsonl").write_text(line)
  with pytest.raises(UserError, match=f"line 1.*{says}"):
    prompts.read(tmp_path / "a.jsonl")


@pytest.mark.slow
def test_a_file_of_conversations_is_answered(home, tmp_path):
  lines = [json.dumps({"messages": TALK}), json.dumps({"prompt": "t6 t7"})]
  (tmp_path / "a.jsonl").write_text("\n".join(lines))
  flags = ("--job_log_dir=ours", "--mode=decode", "--max_new_tokens=6")
  status, out, error = finish(start(*flags, f"--prompt_file={tmp_path / 'a.jsonl'}", cwd=home))
  assert status == 0, error
  (file,) = (home / "ours" / "decode_out").glob("*.jsonl")
  records = [json.loads(line) for line in file.read_text().splitlines()]
  assert {"messages" in record for record in records} == {True, False}
  assert "'t6', sample 0" in out


@pytest.mark.slow
def test_a_conversation_is_held_in_the_terminal(home):
  command = [sys.executable, "-m", "paxlike.main", "--job_log_dir=ours", "--mode=decode", "--chat"]
  main, terminal = pty.openpty()
  process = subprocess.Popen(
    [*command, "--max_new_tokens=3"],
    cwd=home,
    stdin=terminal,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    env=os.environ | {"PYTHONPATH": os.fspath(REPOSITORY)},
  )
  os.write(main, b"t6\nt7\n/reset\nt8 " + b"t9 " * 40 + b"\nt8\n\x04")
  out, _ = process.communicate(timeout=300)
  assert process.returncode == 0, out
  assert "/reset forgets" in out and "(a new conversation)" in out
  assert out.count("leaves no room") == 1 and "/reset begins a new" in out
  assert out.count("> ") == 6


@pytest.mark.slow
def test_without_a_template_a_conversation_is_refused(tmp_path):
  newcomer.make(tmp_path, "mine_quiet", template="")
  assert convert(["--from=hf", f"--path={tmp_path / 'theirs'}", f"--to={tmp_path / 'ours'}"]) == 0
  flags = ("--job_log_dir=ours", "--mode=decode", "--chat")
  status, _, error = finish(start(*flags, cwd=tmp_path))
  assert status == 2 and "set CHAT_TEMPLATE" in error and "chat_template.jinja beside" in error
