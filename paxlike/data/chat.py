# SPDX-License-Identifier: Apache-2.0
"""How messages become text: templates by name, or the tokenizer's own."""

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from paxlike.data import own_template
from paxlike.data.own_template import OwnTemplate
from paxlike.errors import UserError

# {"role": "system" | "user" | "assistant" ..., "content": text}.
Message = Mapping[str, str]


class Part(NamedTuple):
  """A part of a conversation.

  Attributes:
    text: What it says; "" for the end of a document alone.
    learnt: Whether the model is to say it.
    ends: Whether the token that ends a document follows.
  """

  text: str
  learnt: bool
  ends: bool = False


FILES, MORE_TEMPLATES = own_template.FILES, own_template.MORE

Template = Callable[[Sequence[Message]], list[Part]]


def plain(messages: Sequence[Message]) -> list[Part]:
  """What is said, and nothing else."""
  return [_said(message["content"], message, ends=True) for message in messages]


def alpaca(messages: Sequence[Message]) -> list[Part]:
  """Stanford Alpaca's headings."""
  headings = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
  parts = []
  for message in messages:
    parts.append(Part(headings.get(message["role"], ""), False))
    parts.append(_said(message["content"], message, ends=True))
    if message["role"] != "assistant":
      parts.append(Part("\n\n", False))
  return parts


def chatml(messages: Sequence[Message]) -> list[Part]:
  """OpenAI's ChatML, as Qwen has it."""
  return _marked(messages, "<|im_start|>{role}\n", "<|im_end|>", after="\n")


def llama3(messages: Sequence[Message]) -> list[Part]:
  """Llama 3's."""
  return _marked(messages, "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")


def gemma(messages: Sequence[Message]) -> list[Part]:
  """Gemma's, which has no system: what that says begins what the user says."""
  renamed: list[Message] = [
    {**message, "role": {"assistant": "model"}.get(message["role"], message["role"])}
    for message in _with_system_in_user(messages, "{system}\n\n{user}")
  ]
  return _marked(renamed, "<start_of_turn>{role}\n", "<end_of_turn>", after="\n", says="model")


def llama2(messages: Sequence[Message]) -> list[Part]:
  """LLaMA 2's."""
  parts = []
  for message in _with_system_in_user(messages, "<<SYS>>\n{system}\n<</SYS>>\n\n{user}"):
    if message["role"] == "assistant":
      parts.append(_said(message["content"], message, ends=True))
    else:
      parts.append(Part(f"[INST] {message['content']} [/INST]", False))
  return parts


def _said(text: str, message: Message, *, ends: bool = False) -> Part:
  learnt = message["role"] == "assistant"
  return Part(text, learnt, ends and learnt)


def _marked(
  messages: Sequence[Message],
  before: str,
  end: str,
  *,
  after: str = "",
  says: str = "assistant",
) -> list[Part]:
  parts = []
  for message in messages:
    parts.append(Part(before.format(role=message["role"]), False))
    parts.append(Part(message["content"] + end, message["role"] == says))
    if after:
      parts.append(Part(after, False))
  return parts


def _with_system_in_user(messages: Sequence[Message], form: str) -> list[Message]:
  if len(messages) < 2 or messages[0]["role"] != "system":
    return list(messages)
  system, user, *rest = messages
  text = form.format(system=system["content"], user=user["content"])
  return [{**user, "content": text}, *rest]


TEMPLATES: dict[str, Template] = {
  template.__name__: template for template in (alpaca, chatml, gemma, llama2, llama3, plain)
}


def template(name: str, *, vocab_path: str | None) -> Template:
  """Returns a template by name; "tokenizer" is the one in the file beside the tokenizer.

  Raises:
    UserError: There is none.
  """
  if name != "tokenizer":
    return TEMPLATES[name]
  source, file, tokens = own_template.read(pathlib.Path(vocab_path or "tokenizer.json"))
  own = OwnTemplate(source, file=file)
  own.check()
  return functools.partial(_rendered, own, tokens)


def _rendered(
  template: OwnTemplate, tokens: Mapping[str, str], messages: Sequence[Message]
) -> list[Part]:
  """Renders each message as what it adds to the text of those before it."""

  def render(messages: Sequence[Message], *, asks: bool) -> str:
    values = {"messages": [*messages], "tools": None, "documents": None, **tokens}
    return template.render(values | {"add_generation_prompt": asks})

  text, parts = "", []
  for number, message in enumerate(messages, 1):
    if message["role"] == "system" and number < len(messages):
      continue  # Many templates refuse it alone.
    whole = render(messages[:number], asks=False)
    if message["role"] == "assistant":
      asked = render(messages[: number - 1], asks=True)
      parts.append(Part(_added(text, asked), False))
      text = asked
    parts.append(Part(_added(text, whole), message["role"] == "assistant"))
    text = whole
  return parts


def _added(before: str, after: str) -> str:
  if not after.startswith(before):
    raise UserError(
      "CHAT_TEMPLATE=tokenizer: with a further message the template changes the text of earlier"
      " ones, so which text the model is to learn is unknown. Take a template by name."
    )
  return after[len(before) :]
