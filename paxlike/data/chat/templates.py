# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages to text, by a built-in template or the tokenizer's own."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paxlike.data.chat import openai_messages, tokenizer_template
from paxlike.data.chat.openai_messages import Message, Part
from paxlike.data.chat.own_template import OwnTemplate
from paxlike.data.chat.tokenizer_template import TokenizerTemplate
from paxlike.data.tokenizers.tokenizer import Tokenizer

FILES, MORE_TEMPLATES = tokenizer_template.FILES, tokenizer_template.MORE

Template = Callable[[Sequence[Message]], list[Part]]


def plain(messages: Sequence[Message]) -> list[Part]:
  """The contents, without roles."""
  return [_said(message["content"], message, ends=True) for message in messages]


def alpaca(messages: Sequence[Message]) -> list[Part]:
  """Stanford Alpaca's format."""
  headings = {"user": "### Instruction:\n", "assistant": "### Response:\n"}
  parts = []
  for message in messages:
    parts.append(Part(headings.get(message["role"], ""), False))
    parts.append(_said(message["content"], message, ends=True))
    if message["role"] != "assistant":
      parts.append(Part("\n\n", False))
  return parts


def chatml(messages: Sequence[Message]) -> list[Part]:
  """OpenAI's ChatML, as used by Qwen."""
  return _marked(messages, "<|im_start|>{role}\n", "<|im_end|>", after="\n")


def llama3(messages: Sequence[Message]) -> list[Part]:
  """Llama 3's format."""
  return _marked(messages, "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")


def gemma(messages: Sequence[Message]) -> list[Part]:
  """Gemma's format; it has no system role, so a system message is prepended to the user's."""
  renamed: list[Message] = [
    {**message, "role": {"assistant": "model"}.get(message["role"], message["role"])}
    for message in _with_system_in_user(messages, "{system}\n\n{user}")
  ]
  return _marked(renamed, "<start_of_turn>{role}\n", "<end_of_turn>", after="\n", says="model")


def llama2(messages: Sequence[Message]) -> list[Part]:
  """LLaMA 2's format."""
  parts = []
  for message in _with_system_in_user(messages, "<<SYS>>\n{system}\n<</SYS>>\n\n{user}"):
    if message["role"] == "assistant":
      parts.append(_said(message["content"], message, ends=True))
    else:
      parts.append(Part(f"[INST] {message['content']} [/INST]", False))
  return parts


def _said(text: str, message: Message, *, ends: bool = False) -> Part:
  is_target = message["role"] == "assistant"
  return Part(text, is_target, ends and is_target)


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
  """Returns a template by name; "tokenizer" is the one in the folder of the tokenizer.

  Raises:
    UserError: The tokenizer has no template.
  """
  if name != "tokenizer":
    return TEMPLATES[name]
  source, file, tokens = tokenizer_template.read(pathlib.Path(vocab_path or "tokenizer.json"))
  own = TokenizerTemplate(source, file=file)
  own.check()
  return OwnTemplate(own, tokens=tokens)


def parts(
  template: Template, messages: Sequence[Message], variables: Mapping[str, Any]
) -> list[Part]:
  """Returns the spans of a conversation.

  Args:
    template: A result of the function `template`.
    messages: The messages.
    variables: See `openai_messages.variables`.

  Raises:
    UserError: The template does not render all that was given.
  """
  if isinstance(template, OwnTemplate):
    return template(messages, variables)
  openai_messages.check_plain(messages, variables, template=_name(template))
  return template(messages)


def _name(template: Template) -> str:
  return next(name for name, one in TEMPLATES.items() if one is template)


def render(
  template: Template,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool,
  variables: Mapping[str, Any] | None = None,
) -> str:
  """Returns the text of messages, without BOS unless the template adds it.

  Args:
    template: A result of the function `template`.
    messages: The messages.
    add_generation_prompt: Whether to append the beginning of an answer, as in transformers.
    variables: See `openai_messages.variables`.

  Raises:
    UserError: The template does not render all that was given.
  """
  if isinstance(template, OwnTemplate):
    return template.render(
      messages, add_generation_prompt=add_generation_prompt, variables=variables
    )
  if not add_generation_prompt:
    return "".join(part.text for part in parts(template, messages, variables or {}))
  rendered = parts(template, [*messages, {"role": "assistant", "content": ""}], variables or {})
  answer = max(number for number, part in enumerate(rendered) if part.is_target)
  return "".join(part.text for part in rendered[:answer])


class TurnEnd(NamedTuple):
  """The token or the text that ends an answer; both fields are empty if there is none.

  Attributes:
    ids: The id, if the end is one token or begins with a special token.
    texts: The text, otherwise.
  """

  ids: tuple[int, ...]
  texts: tuple[str, ...]


def turn_end(template: Template, tokenizer: Tokenizer) -> TurnEnd:
  """Returns what a template puts after an answer, besides the tokenizer's own end tokens.

  Raises:
    UserError: The tokenizer's own template refuses a question and an answer.
  """
  said = "answer"
  talk: list[Message] = [
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": said},
  ]
  lines = (
    render(template, talk, add_generation_prompt=False).rpartition(said)[2].strip().splitlines()
  )
  if not lines:
    return TurnEnd((), ())
  ids = [int(number) for number in tokenizer.encode(lines[0])]
  if ids and (len(ids) == 1 or not tokenizer.decode(np.array(ids[:1]))):
    return TurnEnd((ids[0],), ())
  return TurnEnd((), (lines[0],))
