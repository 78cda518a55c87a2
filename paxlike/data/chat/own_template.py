# SPDX-License-Identifier: Apache-2.0
"""A tokenizer's own chat template, and which part of its text the assistant writes.

`{% generation %}` blocks of the template mark that text. Without them, it is what the template
outputs for an assistant's messages in a loop over messages, except for what the template appends to
a prompt (`add_generation_prompt`). Comparing the texts of the messages before and up to an answer
would not work: many templates drop the thinking of all turns but the last.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from paxlike.data.chat import openai_messages
from paxlike.data.chat.openai_messages import Message, Part
from paxlike.data.chat.tokenizer_template import TokenizerTemplate
from paxlike.errors import UserError

_SAYS = "CHAT_TEMPLATE=tokenizer: the template"
_MARK_IT = "put {% generation %} and {% endgeneration %} around what the assistant writes in it"
_ASK: Message = {"role": "user", "content": "question"}
_CALL = {"name": "probe_name", "arguments": {"probe": "probe_value"}}
_PROBE: list[Message] = [
  _ASK,
  {
    "role": "assistant",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": _CALL}],
  },
  {"role": "tool", "name": "probe_name", "tool_call_id": "abcdefghi", "content": "probe_result"},
  {"role": "assistant", "content": "answer"},
]
_TOOL = {
  "type": "function",
  "function": {
    "name": "probe_name",
    "description": "Probes.",
    "parameters": {"type": "object", "properties": {"probe": {"type": "string"}}},
  },
}

# (begin, end, index of the message); see `tokenizer_template.Marked`.
Owned = tuple[int, int, int]


class OwnTemplate:
  """The chat template of a tokenizer.

  Attributes:
    source: Its Jinja source.
  """

  def __init__(self, template: TokenizerTemplate, *, tokens: Mapping[str, str]):
    """`tokens` are special tokens by role, such as `bos_token`."""
    self.source = template.source
    self._template = template
    self._tokens = tokens

  def __call__(
    self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None
  ) -> list[Part]:
    """Returns the spans of a conversation.

    Args:
      messages: The messages.
      variables: Further variables of the template, such as `tools`.

    Raises:
      UserError: The template refuses them, or renders no tool call, no tool or no thinking although
        there is one; or which text is the assistant's cannot be found.
    """
    variables = variables or {}
    given = self._normalized(messages, variables)
    marked = self._template.marked(self._values(given, variables))
    self._check_answer(given, marked.text)
    if marked.generated is None:
      spans = self._written(given, variables, marked.text, marked.owned)
    else:
      spans = marked.generated
    parts, at = [], 0
    for begin, end in sorted(spans):
      parts += [Part(marked.text[at:begin], False), Part(marked.text[begin:end], True)]
      at = end
    parts.append(Part(marked.text[at:], False))
    return [part for part in parts if part.text] or parts[:1]

  def render(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None = None,
  ) -> str:
    """Returns the text of messages.

    Args:
      messages: The messages.
      add_generation_prompt: Whether to append the beginning of an answer, as in transformers.
      variables: Further variables of the template, such as `tools`.

    Raises:
      UserError: As of `__call__`.
    """
    variables = variables or {}
    given = self._normalized(messages, variables)
    return self._text(given, variables, add_generation_prompt=add_generation_prompt)

  def _text(
    self,
    given: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
  ) -> str:
    values = self._values(given, variables, add_generation_prompt=add_generation_prompt)
    return self._template.render(values)

  def _values(
    self,
    given: Sequence[Message],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = False,
  ) -> dict[str, Any]:
    own = {"messages": [*given], "add_generation_prompt": add_generation_prompt}
    return {"tools": None, "documents": None, **self._tokens, **variables, **own}

  def _normalized(
    self, messages: Sequence[Message], variables: Mapping[str, Any]
  ) -> list[dict[str, Any]]:
    if variables.get("tools") and not self._renders_tools:
      raise UserError(f"{_SAYS} does not render tools: describe them in a system message instead.")
    if not any(message.get("tool_calls") for message in messages):
      return openai_messages.normalized(messages)
    return openai_messages.normalized(messages, **self._call_form)

  @functools.cached_property
  def _renders_tools(self) -> bool:
    given = [_ASK, {"role": "assistant", "content": "answer"}]
    return _CALL["name"] in self._text(given, {"tools": [_TOOL]})

  @functools.cached_property
  def _call_form(self) -> dict[str, Any]:
    """Arguments of `openai_messages.normalized` with which the template renders a tool call.

    Some templates need arguments as JSON, or a content that is null or "" beside them.
    """
    refusal = None
    for as_text in (False, True):
      for defaults in ({}, {"content": None}, {"content": ""}):
        form = {"arguments_are_text": as_text, "defaults": defaults}
        try:
          text = self._text(openai_messages.normalized(_PROBE, **form), {"tools": [_TOOL]})
        except UserError as error:
          refusal = refusal or error
          continue
        if "probe_value" in text and "probe_result" in text:
          return form
    raise refusal or UserError(f"{_SAYS} does not render tool calls.")

  def _check_answer(self, given: Sequence[Message], text: str):
    """Raises UserError if the template drops the content or the thinking of the last answer."""
    last = given[-1]
    if last["role"] != "assistant":
      return
    content = last.get("content")
    inline, _, said = _without_thinking(content)
    thought = openai_messages.thinking(last) or inline
    if thought.strip() not in text:
      raise UserError(
        f"{_SAYS} drops the thinking of the last answer: use one for training, or leave the"
        " thinking out."
      )
    if said.strip() not in text:
      raise UserError(
        f"{_SAYS} does not render the content of the last answer: it may need one that is a list"
        ' of {"type": "text", "text": ...}.'
      )

  def _written(
    self,
    given: Sequence[Message],
    variables: Mapping[str, Any],
    text: str,
    owned: Sequence[Owned],
  ) -> list[tuple[int, int]]:
    """Returns (begin, end) of what assistants write in `text`."""
    answers = [i for i, one in enumerate(given) if one["role"] == "assistant"]
    if self._are_apart(given, variables, text, owned, answers):
      spans = [self._spans(given, index, variables, text, owned) for index in answers]
    else:
      spans = self._added(given, variables, text, answers)
    for index, pieces in zip(answers, spans, strict=True):
      said = _without_thinking(given[index].get("content"))[2].strip()
      written = "".join(text[begin:end] for begin, end in pieces)
      # Beside tool calls, some templates drop it.
      if said not in written and not given[index].get("tool_calls"):
        raise _unclear(index)
      if said and written.endswith(said):
        raise UserError(
          f"{_SAYS} puts nothing after an answer, so a model would not learn to end it:"
          " put eos_token there in it."
        )
    return [piece for pieces in spans for piece in pieces]

  def _are_apart(
    self,
    given: Sequence[Message],
    variables: Mapping[str, Any],
    text: str,
    owned: Sequence[Owned],
    answers: Sequence[int],
  ) -> bool:
    """Returns whether each answer has text of its own, without that of other messages."""
    if not {*answers} <= {index for *_, index in owned}:
      return False
    try:
      other = self._template.marked(self._values([*map(_varied, given)], variables))
    except UserError:  # The template checks contents.
      return False
    mine, theirs = (
      [whole[begin:end] for begin, end, index in spans if index in answers]
      for whole, spans in ((text, owned), (other.text, other.owned))
    )
    return mine == theirs

  def _added(
    self,
    given: Sequence[Message],
    variables: Mapping[str, Any],
    text: str,
    answers: Sequence[int],
  ) -> list[list[tuple[int, int]]]:
    """Returns the span of each answer: what it adds to a prompt of the earlier messages."""
    other = [*map(_varied, given)]
    varied = self._text(other, variables)
    spans = []
    for index in answers:
      begin, end = self._bounds(given, index, variables, text)
      without = slice(*self._bounds(other, index, variables, varied))
      if varied[without] != text[begin:end]:  # It has text of other messages.
        raise _unclear(index)
      spans.append([(begin, end)])
    return spans

  def _bounds(
    self, given: Sequence[Message], index: int, variables: Mapping[str, Any], text: str
  ) -> tuple[int, int]:
    asked = self._text(given[:index], variables, add_generation_prompt=True)
    answered = self._text(given[: index + 1], variables)
    if not (text.startswith(answered) and answered.startswith(asked)):
      raise _unclear(index)
    return len(asked), len(answered)

  def _spans(
    self,
    given: Sequence[Message],
    index: int,
    variables: Mapping[str, Any],
    text: str,
    owned: Sequence[Owned],
  ) -> list[tuple[int, int]]:
    """Returns the spans of an answer: its text in loops, without what ends a prompt."""
    pieces = [(begin, end) for begin, end, owner in owned if owner == index]
    if index == len(given) - 1:
      # What follows the last answer ends it, too.
      pieces.append((max(end for _, end, _ in owned), len(text)))
    first = self._begin(given, index, variables, text, pieces[0])
    return [(max(begin, first), end) for begin, end in pieces if end > max(begin, first)]

  def _begin(
    self,
    given: Sequence[Message],
    index: int,
    variables: Mapping[str, Any],
    text: str,
    piece: tuple[int, int],
  ) -> int:
    """Returns where in `text` an answer begins, after what a prompt ends with."""
    here = text[slice(*piece)]
    if not index:
      return piece[0] + _num_common([here, *self._heads([], variables)])
    asked = self._text(given[:index], variables, add_generation_prompt=True)
    if text.startswith(asked):
      return len(asked)
    # Earlier thinking is rendered in a prompt, but not here; or a prompt begins thinking.
    before = self._text(given[:index], variables)
    if not asked.startswith(before):
      raise UserError(f"{_SAYS} does not show where answers begin: {_MARK_IT}.")
    begun = asked[len(before) :]
    if here.startswith(begun):
      return piece[0] + len(begun)
    return piece[0] + _num_common([begun, here, *self._heads(given[:index], variables)])

  def _heads(self, given: Sequence[Message], variables: Mapping[str, Any]) -> list[str]:
    """Returns the text of two answers that differ in their first letter, and of a question each."""
    heads = []
    for letter in "AB":
      answered = [*given, {"role": "assistant", "content": letter}, _ASK]
      marked = self._template.marked(self._values(answered, variables))
      begin, end = next((begin, end) for begin, end, i in marked.owned if i == len(given))
      heads.append(marked.text[begin:end])
    return heads


def _unclear(index: int) -> UserError:
  return UserError(
    f"{_SAYS} does not show what of its text message {index + 1} is, of an assistant: {_MARK_IT}."
  )


def _num_common(texts: Sequence[str]) -> int:
  """Returns the length of the longest common prefix."""
  columns = zip(*texts, strict=False)
  return sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, columns))


def _without_thinking(content: Any) -> tuple[str, str, str]:
  """Returns (thinking, "</think>" or "", the rest) of a content; the rest of a list is ""."""
  text = content if isinstance(content, str) else ""
  thought, mark, said = text.partition("</think>")
  return (thought.rpartition("<think>")[2], mark, said) if mark else ("", "", text)


def _varied(message: Message) -> Message:
  """Returns another message instead of one that is not an assistant's."""
  content = message.get("content")
  if message["role"] == "assistant" or not content:
    return message
  if isinstance(content, str):
    return {**message, "content": _varied_text(content, role=message["role"])}
  parts = [{**one, "text": _varied_text(one["text"], role=message["role"])} for one in content]
  return {**message, "content": parts}


def _varied_text(text: str, *, role: str) -> str:
  """Returns a text with one more letter, where templates do not look for tags or flags."""
  at = len(text) if role in ("system", "developer") else len(text) // 2
  return f"{text[:at]}Z{text[at:]}"
