# SPDX-License-Identifier: Apache-2.0
"""Rewards of conversations by a reward model."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from paxlike.data.chat import openai_messages
from paxlike.data.tuning.preferences import ScoredPreferences
from paxlike.devices.batch_placement import BatchPlacer
from paxlike.errors import UserError
from paxlike.layers.attention.auto import Place
from paxlike.layers.decoder import Batch, context_of
from paxlike.layers.module import Definition, Params
from paxlike.layers.reward_model import RewardModel
from paxlike.processes.host_collectives import fetched
from paxlike.training.reinforcement.answers import Answer, pack


class RewardScorer:
  """Scores conversations with a reward model, packed into batches of one shape.

  Attributes:
    seq_len: The most tokens of a conversation.
  """

  def __init__(
    self,
    definition: Definition,
    rows: Any,
    devices: jax.sharding.Mesh,
    *,
    batch_size: int,
    compiler_options: Mapping[str, Any],
  ):
    """Compiles nothing yet.

    Args:
      definition: The model.
      rows: The data that it was trained on, whose tokenizer, template and length are used.
      devices: The mesh.
      batch_size: Sequences of a batch, over all devices.
      compiler_options: XLA's.

    Raises:
      UserError: It is no reward model.
    """
    corpus, model = getattr(rows, "corpus", None), definition.module
    if not isinstance(model, RewardModel) or not isinstance(corpus, ScoredPreferences):
      raise UserError("rewards are given by a reward model: train one with datasets.RewardPairs.")
    self.seq_len: int = rows.seq_len
    self._corpus = corpus
    self._placer = BatchPlacer(
      devices,
      batch_size=batch_size,
      seq_len=self.seq_len,
      max_segments=model.max_segments(Place.on(devices)),
    )

    def score(params: Params, batch: Batch) -> jax.Array:
      model: Any = definition.bind(definition.prepare(params))
      return model.rewards(model.hidden(batch["inputs"], context_of(batch))[0])

    self._score = jax.jit(score, compiler_options=dict(compiler_options))

  def rewards(self, params: Params, conversations: Sequence[Any]) -> list[float]:
    """Returns the reward of each conversation, a list of messages.

    Raises:
      UserError: A conversation is no list of messages or too long.
    """
    documents = []
    for number, messages in enumerate(conversations):
      if not openai_messages.are_messages(messages):
        raise UserError(f"conversation {number}: expected a list of messages: {messages!r:.100}.")
      documents.append(tokens := self._corpus.scored(messages))
      if len(tokens) > self.seq_len:
        raise UserError(
          f"conversation {number} has {len(tokens)} tokens, more than MAX_SEQ_LEN={self.seq_len}."
        )
    return self.scores(params, documents)

  def scores(self, params: Params, documents: Sequence[np.ndarray]) -> list[float]:
    """Returns the reward of each conversation, given its tokens [n], n at most `seq_len`.

    Equal ones are computed once, so that their rewards do not differ by rounding.
    """
    unique = {tokens.tobytes(): tokens for tokens in documents}
    packed = pack(
      # The target of the last token of a conversation stands for its reward.
      [Answer(prompt=tokens, tokens=[0], max_tokens=1) for tokens in unique.values()],
      batch_size=self._placer.batch_size,
      seq_len=self.seq_len,
      max_segments=self._placer.max_segments,
    )
    scored = []
    for batch in packed.batches:
      inputs = {name: batch[name] for name in ("inputs", "segments", "positions")}
      scored.append(fetched(self._score(params, self._placer.put_whole(inputs))))
    rewards = dict(zip(unique, packed.collect(scored), strict=True))
    return [float(rewards[tokens.tobytes()][0]) for tokens in documents]
