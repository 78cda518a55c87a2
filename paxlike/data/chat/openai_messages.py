# SPDX-License-Identifier: Apache-2.0
"""Messages of conversations, as in OpenAI's API."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from paxlike.errors import UserError

# {"role": "system" | "user" | "assistant" | "tool" ..., "content": text}; an assistant's may have
# `tool_calls` and its thinking.
Message = Mapping[str, Any]
# Fields that hold an assistant's thinking, the usual one first.
THINKING = ("reasoning_content", "thinking", "reasoning")
KWARGS = "chat_template_kwargs"


class Part(NamedTuple):
  """A span of a rendered conversation.

  Attributes:
    text: Its text; may be "" if `ends`.
    is_target: Whether its tokens are targets of the loss.
    ends: Whether EOS follows.
  """

  text: str
  is_target: bool
  ends: bool = False


def are_messages(messages: Any) -> bool:
  """Returns whether a JSON value is a non-empty list of messages.

  Each has a role and a content. The content is a text or a list of texts, and may be missing beside
  tool calls or thinking.
  """
  return bool(messages) and isinstance(messages, list) and all(map(_is_message, messages))


def _is_message(message: Any) -> bool:
  if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
    return False
  calls, content = message.get("tool_calls"), message.get("content")
  if calls and not (isinstance(calls, list) and all(isinstance(one, Mapping) for one in calls)):
    return False
  if content is None:
    return bool(calls) or thinking(message) is not None
  return isinstance(content, str) or (
    isinstance(content, list)
    and all(isinstance(one, Mapping) and isinstance(one.get("text"), str) for one in content)
  )


def thinking(message: Message) -> str | None:
  """Returns an assistant's thinking, if it is in a field of its own."""
  return next((message[key] for key in THINKING if isinstance(message.get(key), str)), None)


def variables(record: Mapping[str, Any], *, place: str) -> dict[str, Any]:
  """Returns what a record gives to its template besides messages.

  These are `tools`, OpenAI's list or its JSON, and the values of `chat_template_kwargs`.

  Raises:
    UserError: They are of another form; the message begins with `place`.
  """
  tools, values = (_parsed(record.get(name)) for name in ("tools", KWARGS))
  if tools and not (isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)):
    raise UserError(f"{place}: tools needs a list of functions with their JSON schemas.")
  if values and not (isinstance(values, Mapping) and {"messages", "tools"}.isdisjoint(values)):
    raise UserError(f"{place}: {KWARGS} needs names of a template's variables, with their values.")
  return dict(values or {}) | ({"tools": tools} if tools else {})


def _without_nulls(value: Any) -> Any:
  if isinstance(value, Mapping):
    return {name: _without_nulls(one) for name, one in value.items() if one is not None}
  return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def check_plain(messages: Sequence[Message], given: Mapping[str, Any], *, template: str):
  """Raises UserError if there is more than texts, which is all that built-in templates render."""
  fields = {name for message in messages for name in ("tool_calls", *THINKING) if message.get(name)}
  if not all(isinstance(message.get("content"), str) for message in messages):
    fields.add("content that is not a text")
  if found := sorted(fields | {*given}):
    raise UserError(
      f"CHAT_TEMPLATE={template} has no place for {', '.join(found)}: set CHAT_TEMPLATE=tokenizer"
      " for the template beside VOCAB_PATH."
    )


def normalized(
  messages: Sequence[Message],
  *,
  arguments_are_text: bool = False,
  defaults: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
  """Returns messages as templates read them, as transformers does.

  Fields with null are left out. Thinking has the names that transformers gives it.

  Args:
    messages: As in a record.
    arguments_are_text: Whether arguments of tool calls are JSON; otherwise they are its values.
    defaults: Values of fields that a message lacks.
  """
  found = []
  for message in messages:
    one = {name: value for name, value in message.items() if value is not None}
    thought = thinking(message)
    if thought is not None:
      one = {THINKING[1]: thought, **one, THINKING[0]: thought}
    if one.get("tool_calls"):
      one["tool_calls"] = [_call(call, arguments_are_text) for call in one["tool_calls"]]
    else:
      one.pop("tool_calls", None)  # Templates ask whether the field is there.
    found.append({**(defaults or {}), **one})
  return found


def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
  function = call.get("function")
  if isinstance(function, Mapping):
    return {**_without_nulls(call), "function": _call(function, as_text)}
  given = call.get("arguments")
  if as_text and given is not None and not isinstance(given, str):
    return {**call, "arguments": json.dumps(_without_nulls(given), ensure_ascii=False)}
  return {**call, "arguments": given if as_text else _parsed(given)}


def _parsed(value: Any) -> Any:
  """Returns the value of JSON in a text; another value without nulls, which Parquet adds."""
  if not isinstance(value, str):
    return _without_nulls(value)
  try:
    return json.loads(value)
  except (ValueError, RecursionError):
    return value
