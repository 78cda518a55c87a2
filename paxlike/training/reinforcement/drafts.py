# SPDX-License-Identifier: Apache-2.0
"""Answers as the decoder continues them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from paxlike.inference.generate import STEPS_PER_CALL, Generator
from paxlike.inference.request import Request
from paxlike.inference.sampling import Sampling
from paxlike.layers.module import Definition
from paxlike.training.reinforcement.answers import Answer


class Drafter:
  """Continues answers with one model."""

  def __init__(
    self,
    definition: Definition,
    params: Mapping[str, jax.Array],
    *,
    num_slots: int,
    seq_len: int,
    end_ids: Sequence[int],
    sampling: Sampling,
    phase: str,
    steps_per_call: int = STEPS_PER_CALL,
    compiler_options: Mapping[str, Any] | None = None,
  ):
    """See `Generator`; answers with their prompts are trained on in sequences of `seq_len`."""
    self._generator = Generator(
      definition,
      params,
      num_rows=num_slots,
      max_len=seq_len + 1,  # The last token is only a target.
      sampling=sampling,
      end_ids=end_ids,
      steps_per_call=steps_per_call,
      phase=phase,
      compiler_options=compiler_options,
    )
    self._end_ids = frozenset(end_ids)

  def load(self, params: Mapping[str, jax.Array]):
    """Sets the weights of the next answers."""
    self._generator.load(params)

  def draft(self, answers: Sequence[Answer]) -> Iterator[None]:
    """Continues unfinished answers to their ends, in place; yields from time to time."""
    left = [answer for answer in answers if not answer.is_finished]
    requests = [
      Request(
        tokens=np.append(answer.prompt, answer.tokens).astype(np.int32),
        max_new_tokens=answer.max_tokens - len(answer.tokens),
        seed=answer.seed,
      )
      for answer in left
    ]
    for grown in self._generator.run(requests):
      for text in grown:
        if text.ended_by is not None:
          answer, end = left[text.request], [] if text.end is None else [text.end]
          answer.tokens += [*text.tokens, *(token for token, _ in end)]
          answer.drafted += [*text.log_probabilities, *(value for _, value in end)]
          answer.has_ended = bool(end)
      yield

  def cut(self, answer: Answer, first: int, token: int):
    """Replaces the token at `first`, and all after it, by another one."""
    answer.tokens[first:] = [token]
    answer.drafted[first:] = [np.nan]
    answer.has_ended = token in self._end_ids
