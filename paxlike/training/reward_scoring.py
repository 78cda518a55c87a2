# SPDX-License-Identifier: Apache-2.0
"""Rewards of conversations by a reward model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from paxlike.data.chat import openai_messages
from paxlike.data.tuning.preferences import ScoredPreferences
from paxlike.errors import UserError
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.module import Params
from paxlike.layers.reward_model import RewardModel

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


class RewardScorer:
  """Scores conversations with the reward model of a trainer."""

  def __init__(self, trainer: "Trainer"):
    """Compiles nothing yet.

    Raises:
      UserError: The trainer has no reward model.
    """
    corpus, definition = getattr(trainer.data, "corpus", None), trainer.definition
    if not isinstance(trainer.model, RewardModel) or not isinstance(corpus, ScoredPreferences):
      raise UserError("rewards are given by a reward model: train one with datasets.RewardPairs.")
    self._corpus, self._seq_len = corpus, trainer.data.seq_len

    def score(params: Params, batch: Batch) -> jax.Array:
      model: Any = definition.bind(definition.prepare(params))
      return model.rewards(model.hidden(batch["inputs"], context_of(batch))[0])

    self._score = jax.jit(score, compiler_options=dict(trainer.execution.compiler_options))

  def rewards(self, params: Params, conversations: Sequence[Any]) -> list[float]:
    """Returns the reward of each conversation, a list of messages.

    Raises:
      UserError: A conversation is no list of messages or too long.
    """
    documents = [self._tokens(number, given) for number, given in enumerate(conversations)]
    shape = len(documents), self._seq_len
    inputs_BT, positions_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for number, tokens in enumerate(documents):
      inputs_BT[number, : len(tokens)] = tokens
      positions_BT[number, : len(tokens)] = np.arange(len(tokens))
    rewards_BT = np.asarray(self._score(params, {"inputs": inputs_BT, "positions": positions_BT}))
    ends = [len(tokens) - 1 for tokens in documents]
    return [float(row_T[end]) for row_T, end in zip(rewards_BT, ends, strict=True)]

  def _tokens(self, number: int, messages: Any) -> np.ndarray:
    if not openai_messages.are_messages(messages):
      raise UserError(f"conversation {number}: expected a list of messages: {messages!r:.100}.")
    tokens = self._corpus.scored(messages)
    if len(tokens) > self._seq_len:
      raise UserError(
        f"conversation {number} has {len(tokens)} tokens, more than MAX_SEQ_LEN={self._seq_len}."
      )
    return tokens
