# SPDX-License-Identifier: Apache-2.0
"""A chat model that was fine-tuned is one for transformers: its template, and where a turn ends."""

import json
import sys

import pytest
from helpers import newcomer
from helpers.program import run

from paxlike.convert.main import run as convert
from paxlike.data.chat import exported_templates, templates
from paxlike.data.chat.tokenizer_template import TokenizerTemplate
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer

TALK = [
  {"role": "system", "content": "Be kind."},
  {"role": "user", "content": "Who's \\there?"},
  {"role": "assistant", "content": "Me."},
  {"role": "user", "content": "And\nyou?"},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
  folder = tmp_path_factory.mktemp("home")
  newcomer.make(folder, "mine_chats")
  assert convert(["--from=hf", f"--path={folder / 'theirs'}", f"--to={folder / 'ours'}"]) == 0
  return folder


@pytest.fixture
def at_home(home, monkeypatch):
  monkeypatch.chdir(home)
  monkeypatch.setattr(sys, "path", [*sys.path])
  return home


@pytest.mark.slow
@pytest.mark.parametrize(
  ("template", "lora", "ends"),
  [("tokenizer", True, [1, 2]), ("chatml", False, [1, 61]), ("plain", True, 1)],
)
def test_what_a_chat_needs_survives_fine_tuning(at_home, tmp_path, template, lora, ends):
  trained, back = tmp_path / "run", tmp_path / "back"
  flags = (f"--fdl.CHAT_TEMPLATE={template}", f"--fdl.USE_LORA={lora}")
  assert run("--fdl_config=mine_chats.MyChat", f"--job_log_dir={trained}", *flags) == 0
  convert_flags = ["--from=paxlike", f"--path={trained}", f"--to={back}"]
  assert convert([*convert_flags, "--fdl_allow_modules=mine_chats"]) == 0
  generation = json.loads((back / "generation_config.json").read_text())
  assert (generation["eos_token_id"], generation["temperature"]) == (ends, 0.6)
  config = json.loads((back / "config.json").read_text())
  assert (config["eos_token_id"], config["bos_token_id"]) == (ends, 0)
  settings = json.loads((back / "tokenizer_config.json").read_text())
  assert ("chat_template" in settings) == (template == "tokenizer")  # There is one template.
  assert (back / "chat_template.jinja").exists() == (template != "tokenizer")
  assert settings["eos_token"] == "</s>"
  vocabulary = str(back / "tokenizer.json")
  talk = [{"role": "user", "content": "t6"}, {"role": "assistant", "content": "t7"}]
  theirs = templates.render(
    templates.template("tokenizer", vocab_path=vocabulary), talk, add_generation_prompt=False
  )
  ours = templates.template(template, vocab_path=str(trained / "tokenizer" / "tokenizer.json"))
  text = templates.render(ours, talk, add_generation_prompt=False)
  assert theirs.removeprefix("<s>").removesuffix("</s>") == text
  assert theirs.endswith("</s>") == (template == "plain")


def test_a_tokenizer_that_was_forgotten_is_named_with_the_flags_for_it(at_home, tmp_path, capsys):
  flags = ("--fdl_config=mine_chats.MyChat", f"--job_log_dir={tmp_path / 'run'}")
  flags += ("--mode=eval", "--fdl.VOCAB_PATH=None", "--fdl.TOKENIZER=byte")
  assert run(*flags) == 2
  error = capsys.readouterr().err
  hints = [word for word in error.split() if word.startswith("--fdl.")]
  assert len(hints) == 2 and str(at_home / "ours" / "tokenizer.json") in hints[1]
  assert run(*flags[:3], *hints) == 0


@pytest.mark.parametrize("name", templates.TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_template_in_jinja_is_the_template(tmp_path, name, add_generation_prompt):
  own = TokenizerTemplate(
    exported_templates.source(name, bos="<s>", eos="</s>"), file=tmp_path / "x"
  )
  for talk in (TALK, TALK[1:], TALK[:3]):
    values = {"messages": talk, "add_generation_prompt": add_generation_prompt}
    parts = templates.TEMPLATES[name](talk)
    text = "<s>" + "".join(part.text + "</s>" * part.ends for part in parts)
    if add_generation_prompt:
      answer = {"role": "assistant", "content": ""}
      parts = templates.TEMPLATES[name]([*talk, answer])
      last = max(i for i, part in enumerate(parts) if part.is_target)
      text = "<s>" + "".join(part.text + "</s>" * part.ends for part in parts[:last])
    assert own.render(values) == text


def test_the_end_of_a_turn_is_a_token_or_else_a_text(at_home):
  tokenizer = HuggingFaceTokenizer(at_home / "theirs" / "tokenizer.json")
  assert templates.turn_end(templates.TEMPLATES["chatml"], tokenizer) == ((61,), ())
  assert templates.turn_end(templates.TEMPLATES["plain"], tokenizer) == ((), ())

  assert templates.turn_end(templates.TEMPLATES["chatml"], ByteTokenizer()) == ((), ("<|im_end|>",))
