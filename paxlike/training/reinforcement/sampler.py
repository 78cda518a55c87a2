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

import collections
from collections.abc import Sequence

import jax
import numpy as np

from paxlike.data.dataset import Arrays
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.processes import phases
from paxlike.processes.host_collectives import fetched
from paxlike.training.forward_backward import Forward, ForwardBackward
from paxlike.training.gradients import Constants, Differentiated
from paxlike.training.reinforcement.answers import Answer, Packed, pack
from paxlike.training.reinforcement.drafts import Drafter

MOST_ROUNDS = 8


class Sampler:
  """Samples answers with a decoder and the training forward pass.

  Attributes:
    redrawn: Number of drafted tokens of the last call that the forward pass replaced.
    unsettled: Number of answers of the last call that the forward pass would still change after
      `MOST_ROUNDS`; they are kept as drafted.
  """

  def __init__(
    self, drafter: Drafter, passes: ForwardBackward, placer: BatchPlacer, *, seq_len: int
  ):
    """`drafter` and `passes` must have the same `Sampling`.

    Batches have the shape of `placer`, with sequences of `seq_len` tokens.
    """
    self._drafter = drafter
    self._passes = passes
    self._placer = placer
    self._seq_len = seq_len
    self._is_compiled = False
    self.redrawn = self.unsettled = 0

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
    self._drafter.load(weights.trained | constants.frozen | weights.extra)
    self.redrawn = self.unsettled = 0
    collections.deque(self._drafter.draft(answers), maxlen=0)
    pending = list(answers)
    for number in range(MOST_ROUNDS + 1):
      is_last = number == MOST_ROUNDS
      if is_last or not pending:
        pending = list(answers)
      packed = self.packed(pending)
      results = [self.score(prepared, batch) for batch in packed.batches]
      drawn = packed.collect(fetched([result.scores.drawn_BT for result in results]))
      others = [
        (answer, int(np.flatnonzero(tokens != answer.tokens)[0]), tokens)
        for answer, tokens in zip(pending, drawn, strict=True)
        if not np.array_equal(tokens, answer.tokens)
      ]
      if is_last or (not others and len(pending) == len(answers)):
        self.unsettled = len(others)
        break
      for answer, first, tokens in others:
        self._drafter.cut(answer, first, int(tokens[first]))
      self.redrawn += len(others)
      # Those that stand are drawn again at the end, in the batches that are trained.
      pending = [answer for answer, *_ in others]
      collections.deque(self._drafter.draft(pending), maxlen=0)
    scores = [result.scores for result in results]
    found = packed.collect(fetched([one.log_probabilities_BT for one in scores]))
    for answer, log_probabilities in zip(answers, found, strict=True):
      answer.log_probabilities = log_probabilities
    if scores and scores[0].values_BT is not None:
      values = packed.collect(fetched([one.values_BT for one in scores]))
      for answer, of_answer in zip(answers, values, strict=True):
        answer.values = of_answer
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
    result = self._passes.forward(*prepared, self._placer.put_whole(batch))._replace(residuals=None)
    jax.block_until_ready(result.scores)
    self._is_compiled = True
    return result
