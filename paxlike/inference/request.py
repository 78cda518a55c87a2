# SPDX-License-Identifier: Apache-2.0
"""Prompts to continue, and their texts so far."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt to continue.

  Attributes:
    tokens: int32, at least one.
    max_new_tokens: The text ends after this many.
    seed: Of its sampling; draws do not depend on other requests.
    adapter: The number of its adapter in a `LoraBank`; -1: the base model.
  """

  tokens: np.ndarray
  max_new_tokens: int
  seed: int = 0
  adapter: int = -1


@dataclasses.dataclass(kw_only=True)
class GeneratedText:
  """The text of a request so far.

  Attributes:
    request: Index of the request.
    prompt_length: Number of prompt tokens.
    tokens: New tokens, without the end token.
    log_probabilities: Of each new token, under the model.
    end: The end token and its log-probability; None if it has not ended by one.
    ended_by: "stop" (an end token, or the caller's `close`), "length", or None if unfinished.
  """

  request: int
  prompt_length: int
  tokens: list[int] = dataclasses.field(default_factory=list)
  log_probabilities: list[float] = dataclasses.field(default_factory=list)
  end: tuple[int, float] | None = None
  ended_by: str | None = None

  @property
  def length(self) -> int:
    """Number of tokens of prompt and text."""
    return self.prompt_length + len(self.tokens)

  def close(self):
    """Ends the text and frees its slot."""
    self.ended_by = self.ended_by or "stop"
