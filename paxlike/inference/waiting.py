# SPDX-License-Identifier: Apache-2.0
"""The texts that wait for a decode slot."""

import collections
import dataclasses
from collections.abc import Iterable

import numpy as np

from paxlike.errors import UserError
from paxlike.inference.request import GeneratedText, Request


class WaitingTexts:
  """Texts without a decode slot, in the order in which they get one.

  With a switch of the rotary frequencies (see `Decoder.rope_switch`), a text ends at the switch and
  waits again: keys before it are computed anew, with the other frequencies.
  """

  def __init__(self, requests: Iterable[Request], *, max_len: int, switch: int | None):
    """All texts wait, in the order of their requests.

    Args:
      requests: The prompts.
      max_len: Tokens of the longest text, including its prompt.
      switch: The most tokens whose keys have the first frequencies; None: there are no others.

    Raises:
      UserError: A prompt is empty, or exceeds `max_len` with its new tokens.
    """
    self._requests = list(requests)
    self._switch = switch
    self._texts: collections.deque[GeneratedText] = collections.deque()
    for number, request in enumerate(self._requests):
      _check(number, request, max_len)
      self._texts.append(GeneratedText(request=number, prompt_length=len(request.tokens)))

  def __len__(self) -> int:
    return len(self._texts)

  def pop(self, most: int) -> list[tuple[Request, GeneratedText]]:
    """Removes the next texts, at most this many; returns each with the request to go on with."""
    texts = [self._texts.popleft() for _ in range(min(most, len(self)))]
    return [(self._rest_of(text), text) for text in texts]

  def reopened(self, texts: Iterable[GeneratedText]) -> list[GeneratedText]:
    """Reopens and returns those of `texts` that ended at the switch."""
    found = [
      text
      for text in texts
      if text.ended_by == "length"
      and len(text.tokens) < self._requests[text.request].max_new_tokens
    ]
    for text in found:
      text.ended_by = None
    return found

  def put_back(self, texts: Iterable[GeneratedText]):
    """Lets texts that have not ended wait before all others."""
    self._texts.extendleft(text for text in texts if text.ended_by is None)

  def _rest_of(self, text: GeneratedText) -> Request:
    """Returns the request for the rest of a text, up to the switch if it begins before it."""
    request = self._requests[text.request]
    tokens = np.concatenate([request.tokens, np.asarray(text.tokens, np.int32)])
    most = request.max_new_tokens - len(text.tokens)
    if self._switch is not None and len(tokens) <= self._switch:
      most = min(most, self._switch + 1 - len(tokens))
    return dataclasses.replace(request, tokens=tokens, max_new_tokens=most)


def _check(number: int, request: Request, max_len: int):
  size = len(request.tokens)
  if not size:
    raise UserError(f"prompt {number} is empty: it needs at least one token.")
  if request.max_new_tokens < 1:
    raise UserError("max_new_tokens must be at least 1.")
  if size + request.max_new_tokens > max_len:
    raise UserError(
      f"prompt {number} has {size} tokens, which with {request.max_new_tokens} new ones exceed"
      f" the model's {max_len} (MAX_SEQ_LEN)."
    )
