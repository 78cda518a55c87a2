# SPDX-License-Identifier: Apache-2.0
"""What an assistant writes, in a tokenizer's own template: compared with transformers and TRL."""

import functools
import json
import pathlib
import re

import jinja2
import numpy as np
import pytest
import tokenizers

from paxlike.data.chat import template_worker
from paxlike.data.chat.own_template import OwnTemplate
from paxlike.data.chat.tokenizer_template import Marked, TokenizerTemplate
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tuning import conversations
from paxlike.errors import UserError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}}
TOOLS = [
  {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
]


def user(text):
  return {"role": "user", "content": text}


def answer(text, thought=None):
  return {"role": "assistant", "content": text, "reasoning_content": thought}


def call(number, thought=None, content=None):
  arguments = json.dumps({"a": number})  # As OpenAI's API has it.
  function = {"name": "add", "arguments": arguments}
  calls = [{"id": "abcdefgh1", "type": "function", "function": function}]
  return answer(content, thought) | {"tool_calls": calls}


def result(text):
  return {"role": "tool", "name": "add", "tool_call_id": "abcdefgh1", "content": text}


PLAIN = [user("Hi"), answer("Hello!"), user("Bye"), answer("See you.")]
CALLS = [
  *(user("1+2?"), call(1), result("3"), answer("It is 3.")),
  *(user("2+2?"), call(2), result("4"), answer("It is 4.")),
]
TALKS = {
  "plain": (PLAIN, {}),
  "system": ([{"role": "system", "content": "Be brief."}, *PLAIN], {}),
  "thinking": ([user("a"), answer("Hello!", "Greet."), user("b"), answer("See you.", "Ends.")], {}),
  "calls": (CALLS, {}),
  "everything": (
    [
      *(user("1+2?"), call(1, "I add."), result("3"), answer("It is 3.", "So 3.")),
      *(user("2+2?"), call(2, "Again."), result("4"), answer("It is 4.", "So 4.")),
    ],
    {"tools": TOOLS},
  ),
}
# What is neither an answer nor its end, but TRL marks it: the beginning of a prompt's answer.
HEADS = {
  "<｜Assistant｜>",
  "<｜tool▁outputs▁end｜>",
  "<|start|>assistant",
  "<think>",
  "\n",
  "<think>\n",
}


class InProcess(TokenizerTemplate):
  """Renders in this process, since others take time to start."""

  def marked(self, values):
    return Marked(**self._answer(values, marked=True))

  def render(self, values):
    return self._answer(values, marked=False)["text"]

  @functools.cached_property
  def _here(self):
    return template_worker.Template(self.source)

  def _answer(self, values, *, marked):
    try:
      return self._here.answer(json.loads(json.dumps(values)), marked=marked)
    except (ValueError, TypeError, jinja2.TemplateError) as error:
      raise UserError(f"CHAT_TEMPLATE=tokenizer: {error}") from None


def template(source):
  return OwnTemplate(InProcess(source, file=pathlib.Path("it")), tokens=TOKENS)


def written(parts):
  return [part.text for part in parts if part.is_target]


def flags(parts):
  """Returns whether each character is a target."""
  return np.repeat([part.is_target for part in parts], [len(part.text) for part in parts])


def runs(text, kept):
  """Returns the pieces of a text where `kept` is true."""
  bounds = np.flatnonzero(np.diff(np.concatenate([[0], kept.astype(int), [0]])))
  return {text[begin:end] for begin, end in bounds.reshape(-1, 2)}


@pytest.mark.slow
def test_published_templates_have_the_masks_of_transformers_and_trl(tmp_path):
  import transformers
  import trl

  folder = pathlib.Path(trl.__file__).parent / "chat_templates"
  sources = {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}
  special = {token for text in sources.values() for token in re.findall(r"<[|｜][^<>' ]+>", text)}
  model = tokenizers.Tokenizer(tokenizers.models.BPE())
  model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
  model.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
  trainer = tokenizers.trainers.BpeTrainer(
    special_tokens=["<s>", "</s>", *sorted(special)],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  model.train_from_iterator(["Hello! See you. Greet. It is 3."] * 3, trainer)
  model.save(str(tmp_path / "tokenizer.json"))
  kind = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(kind))
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ours = HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))
  found, marked, derived = {}, 0, 0
  for name, source in sources.items():
    own = template(source)
    for talk, (messages, variables) in TALKS.items():
      try:
        parts = found[name, talk] = own(messages, variables)
      except UserError:
        continue
      encoded = conversations._encoded_whole(ours, parts)
      assert encoded is not None
      given = own._normalized(messages, variables)
      is_marked = "endgeneration" in source
      try:
        expected = theirs.apply_chat_template(
          given, chat_template=source, return_assistant_tokens_mask=is_marked, **variables
        )
      except jinja2.TemplateError as error:  # It leaves out a content that is null.
        assert "content" in str(error) and "deepseek" in name
        continue
      assert encoded[0].tolist() == expected["input_ids"], (name, talk)
      if is_marked:
        marked += 1
        assert encoded[1].tolist() == expected["assistant_masks"], (name, talk)
  # TRL's templates with marks, and the published ones without.
  for (name, talk), parts in found.items():
    other = found.get((f"{name}_training", talk))
    text = "".join(part.text for part in parts)
    if other is not None and text == "".join(part.text for part in other):
      derived += 1
      assert runs(text, flags(other) & ~flags(parts)) <= HEADS, (name, talk)
      extra = {"<|tool_response>", "<|turn>model\n"} if name == "diffusion_gemma" else set()
      assert runs(text, flags(parts) & ~flags(other)) <= extra, (name, talk)
  assert marked > 70 and derived > 50


# As Qwen3: the thinking of the last answer only.
THINKS = (
  "{%- for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}"
  "[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<end>{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Gemma 4: results are in the turn that called.
LOOKS_AHEAD = (
  "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<model>{% endif %}"
  "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}<call>"
  "{% if not loop.last or messages[-1] != m %}{{ messages[messages.index(m) + 1].content }}<result>"
  "{% endif %}{% endfor %}{% if m.role == 'assistant' and m.content %}{{ m.content }}<end>"
  "{% endif %}{% endfor %}"
)
CALLED = ['add{"a": 1}<call>', "It is 3.<end>", 'add{"a": 2}<call>', "It is 4.<end>"]


@pytest.mark.parametrize(
  ("source", "messages", "expected"),
  [
    (THINKS, TALKS["thinking"][0], ["Hello!<end>", "[Ends.]See you.<end>"]),
    (
      # As Qwen3.5: a prompt begins the thinking.
      THINKS.replace("[{{", "[[{{").replace("<assistant>{% endif %}", "<assistant>[[{% endif %}"),
      [user("Hi"), answer("[Hello]"), user("Bye"), answer("See you.", "Ends.")],
      ["[Hello]<end>", "Ends.]See you.<end>"],
    ),
    (
      LOOKS_AHEAD,
      CALLS,
      CALLED,
    ),
    (
      # As DeepSeek-V3: arguments are JSON.
      "{% for m in messages %}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}"
      "{{ c.function.name + c.function.arguments }}{% endfor %}<call>{% else %}"
      "{% if m.role == 'assistant' %}!{% endif %}{{ m.content }}<end>{% endif %}{% endfor %}"
      "{% if add_generation_prompt and messages[-1].role == 'tool' %}!{% endif %}",
      CALLS,
      CALLED,
    ),
  ],
)  # fmt: skip
def test_targets_are_what_the_assistant_writes(source, messages, expected):
  assert written(template(source)(messages)) == expected


@pytest.mark.parametrize(
  ("talk", "source", "says"),
  [
    ("calls", "{% for m in messages %}{{ m.content }}.{% endfor %}", "does not render tool calls"),
    ("everything", THINKS, "does not render tools"),
    ("thinking", "{% for m in messages %}{{ m.content }}.{% endfor %}", "drops the thinking"),
    ("plain", "{% for m in messages %}{{ m.role }}.{% endfor %}", "does not render the content"),
    ("plain", "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}", "nothing after"),
    ("plain", "{{ messages | length }}{{ messages }}", "does not show what of its text message 2"),
    # The assistant's text has the user's.
    (
      "plain",
      "{% for m in messages %}{% if m.role == 'assistant' %}{{ messages[loop.index0 - 1].content }}"
      ":{{ m.content }};{% endif %}{% endfor %}",
      "does not show",
    ),
    # A mark of the renderer's own.
    ("plain", "{% for m in messages %}\ufdd0{{ m.content }}.{% endfor %}", "whose"),
  ],
)
def test_no_mask_is_better_than_a_wrong_one(talk, source, says):
  with pytest.raises(UserError, match=f"^CHAT_TEMPLATE=tokenizer: .*{says}"):
    template(source)(*TALKS[talk])
