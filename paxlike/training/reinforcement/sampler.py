# SPDX-License-Identifier: Apache-2.0
"""Samples answers from exactly the distribution that is trained.

A decoder computes a token's logits by other operations than a forward pass over whole sequences:
with a cache, for one token, perhaps on another mesh. They differ by rounding, so that what it
samples is not quite what the trained model would say. Here the decoder only drafts. The training
forward pass then draws each token again, with the same random numbers; where it draws another one,
the answer is cut off there and drafted again from that token. What is left are samples of the
training forward pass, and their log-probabilities are its own. Almost all drafts stand, since both
draw the same token unless two are tied up to rounding.
"""

from collections.abc import Sequence

import jax
import numpy as np

from paxlike.data.dataset import Arrays
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.inference.generate import Generator, Request, Speed
from paxlike.processes import phases
from paxlike.training.forward_backward import Forward, ForwardBackward
from paxlike.training.gradients import Constants, Differentiated
from paxlike.training.reinforcement.answers import Answer, Packed, pack

MOST_ROUNDS = 8


class Sampler:
  """Samples answers with a decoder and the training forward pass.

  Attributes:
    redrawn: Number of drafted tokens of the last call that the forward pass replaced.
    unsettled: Number of answers of the last call that the forward pass would still change after
      `MOST_ROUNDS`; they are kept as drafted.
  """

  def __init__(
    self,
    generator: Generator,
    passes: ForwardBackward,
    placer: BatchPlacer,
    *,
    seq_len: int,
    max_new_tokens: int,
    end_ids: Sequence[int],
  ):
    """`generator` must sample as `passes` do, and end texts at `end_ids`.

    Batches have the shape of `placer`, with sequences of `seq_len` tokens; answers have at most
    `max_new_tokens`.
    """
    self._generator = generator
    self._passes = passes
    self._placer = placer
    self._seq_len = seq_len
    self._max_new_tokens = max_new_tokens
    self._end_ids = frozenset(end_ids)
    self._is_compiled = False
    self.redrawn = self.unsettled = 0

  @property
  def speed(self) -> Speed:
    """The decoder's; totals of all calls."""
    return self._generator.speed

  def sample(
    self, prepared: tuple[Differentiated, Constants], answers: Sequence[Answer]
  ) -> tuple[Packed, list[Forward]]:
    """Samples empty answers, in place.

    Args:
      prepared: The weights; see `ForwardBackward.prepare`.
      answers: Without tokens.

    Returns:
      The answers as batches, and the result of the forward pass of each, without residuals.
    """
    weights, constants = prepared
    self._generator.load(weights.trained | constants.frozen | weights.extra)
    self.redrawn = self.unsettled = 0
    self._draft(answers)
    for number in range(MOST_ROUNDS + 1):
      packed = self.packed(answers)
      results = [self.score(prepared, batch) for batch in packed.batches]
      drawn = packed.collect([np.asarray(result.scores.drawn_BT) for result in results])
      others = [
        (a, tokens) for a, tokens in zip(answers, drawn, strict=True) if _differs(a, tokens)
      ]
      if not others or number == MOST_ROUNDS:
        self.unsettled = len(others)
        break
      for answer, tokens in others:
        self._cut(answer, tokens)
      self._draft([answer for answer, _ in others])
    found = packed.collect([np.asarray(r.scores.log_probabilities_BT) for r in results])
    for answer, log_probabilities in zip(answers, found, strict=True):
      answer.log_probabilities = log_probabilities
    return packed, results

  def packed(self, answers: Sequence[Answer]) -> Packed:
    """Returns answers as batches."""
    return pack(
      answers,
      batch_size=self._placer.batch_size,
      seq_len=self._seq_len,
      max_segments=self._placer.max_segments,
    )

  def score(self, prepared: tuple[Differentiated, Constants], batch: Arrays) -> Forward:
    """Returns the result of a forward pass without residuals, which take memory."""
    phases.enter("sample" if self._is_compiled else "compile")
    result = self._passes.forward(*prepared, self._placer.put(batch))._replace(residuals=None)
    jax.block_until_ready(result.scores)
    self._is_compiled = True
    return result

  def _draft(self, answers: Sequence[Answer]):
    """Continues answers to their ends."""
    answers = [
      answer
      for answer in answers
      if not answer.has_ended and len(answer.tokens) < self._max_new_tokens
    ]
    requests = [
      Request(
        tokens=np.append(answer.prompt, answer.tokens).astype(np.int32),
        max_new_tokens=self._max_new_tokens - len(answer.tokens),
        seed=answer.seed,
      )
      for answer in answers
    ]
    for grown in self._generator.run(requests):
      for text in grown:
        if text.ended_by is None:
          continue
        answer, end = answers[text.request], [] if text.end is None else [text.end]
        answer.tokens += [*text.tokens, *(token for token, _ in end)]
        answer.drafted += [*text.log_probabilities, *(value for _, value in end)]
        answer.has_ended = bool(end)

  def _cut(self, answer: Answer, drawn: np.ndarray):
    """Replaces the first token that differs from the drawn one, and all after it, by that one."""
    first = int(np.flatnonzero(drawn != answer.tokens)[0])
    answer.tokens[first:] = [int(drawn[first])]
    answer.drafted[first:] = [np.nan]
    answer.has_ended = answer.tokens[-1] in self._end_ids
    self.redrawn += 1


def _differs(answer: Answer, drawn: np.ndarray) -> bool:
  return not np.array_equal(drawn, answer.tokens)
