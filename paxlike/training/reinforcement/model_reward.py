# SPDX-License-Identifier: Apache-2.0
"""Rewards of answers by a reward model: the trained model of another folder."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from etils import epath

from paxlike.checkpoints.saved_model import SavedModel
from paxlike.config import building, graph_file
from paxlike.config.configurable import configurable
from paxlike.data.chat.openai_messages import Message
from paxlike.data.tuning.preferences import ScoredPreferences
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params
from paxlike.layers.reward_model import RewardModel
from paxlike.processes import phases
from paxlike.training import requirements
from paxlike.training.initial_state import StateSource
from paxlike.training.reinforcement.reward_scoring import RewardScorer

# A conversation and what its record gives to the template besides; see `openai_messages.variables`.
Conversation = tuple[Sequence[Message], Mapping[str, Any]]


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReward(SavedModel):
  """A reward model that gives answers their rewards. Building it reads nothing."""

  knob: ClassVar[str] = "REWARD_MODEL"
  what: ClassVar[str] = "reward model"
  file: ClassVar[str] = "reward_model.json"
  places: ClassVar[str] = "a run of a reward model (datasets.RewardPairs)"

  @functools.cached_property
  def definition(self) -> Definition:
    """The model, as config.json of the folder defines it.

    Raises:
      UserError: The file cannot be read, or is not of a reward model.
    """
    if not isinstance(self.model, RewardModel):
      raise UserError(
        f"REWARD_MODEL={self.path} is a {type(self.model).__name__}, not a reward model: give the"
        f" folder of {self.places}."
      )
    return Definition(self.model, trained=self._run.get("trained", ""))

  @property
  def rows(self) -> Any:
    """The data that it was trained on, of which tokenizer, template and length are used."""
    return self._run.get("train_data")

  @functools.cached_property
  def _run(self) -> Mapping[str, Any]:
    """The other parts of the graph of its run that are needed, built."""
    names = ("optimizer", "train_data", "trained", "seed")
    with self.naming():
      parts = graph_file.read_parts(self.folder / "config.json", names)
      return {name: building.part(parts[name], source=name) for name in names if name in parts}

  def check(self, devices: jax.sharding.Mesh, *, max_prompt_tokens: int, max_new_tokens: int):
    """Checks the folder, and that answers with their prompts fit; reads no array.

    Raises:
      UserError: It is no reward model, has no checkpoint, or its sequences are too short.
    """
    _ = self.definition
    with self.naming():
      if not isinstance(corpus := getattr(self.rows, "corpus", None), ScoredPreferences):
        raise UserError("it was not trained on the data of datasets.RewardPairs.")
      if max_prompt_tokens + max_new_tokens > self.rows.seq_len:
        raise UserError(
          f"MAX_PROMPT_TOKENS={max_prompt_tokens} and MAX_NEW_TOKENS={max_new_tokens} exceed its"
          f" MAX_SEQ_LEN={self.rows.seq_len}: set them lower, or take a reward model of longer"
          " conversations."
        )
      requirements.check(self.model, list(devices.devices.flat))
      corpus.tokenizer.check(self.model.vocab_size)
      said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
      corpus.scored(said)  # Reads tokenizer and template.
      self.saved.find(self.step)

  def load(self, devices: jax.sharding.Mesh, run: epath.Path | None) -> tuple[Params, str]:
    """Returns (weights in their compute dtypes on a mesh, the record of their checkpoint).

    They are those that the run of the reward model evaluates; if the run in `run` had a reward
    model before, those of that checkpoint.

    Raises:
      UserError: The checkpoint is missing, damaged or of another model, or not the one before.
    """
    with self.naming():
      source = StateSource(
        folder=self.folder,
        definition=self.definition,
        optimizer=self._run["optimizer"],
        devices=devices,
        seed=self._run["seed"],
        restore=None,
      )
      step, params = source.params(self.step_of(run))
      return self.definition.prepare(params), self.record(step)


class AnswerScorer:
  """Scores answers with a reward model on the devices of a run."""

  def __init__(
    self,
    model: ModelReward,
    devices: jax.sharding.Mesh,
    *,
    batch_size: int,
    compiler_options: Mapping[str, Any],
  ):
    """Loads and compiles nothing yet; see `RewardScorer`."""
    self._model = model
    self._devices = devices
    self._scorer = RewardScorer(
      model.definition,
      model.rows,
      devices,
      batch_size=batch_size,
      compiler_options=compiler_options,
    )
    self._loaded: tuple[Params, str] | None = None
    self._is_compiled = False

  def load(self, run: epath.Path | None = None) -> dict[str, str]:
    """Loads the weights, once; returns the record for the run's folder by its name.

    `run` is the folder that has the record of the steps so far; None: there are none.
    """
    if self._loaded is None:
      self._loaded = self._model.load(self._devices, run)
    return {self._model.file: self._loaded[1]}

  def __call__(self, conversations: Sequence[Conversation]) -> tuple[list[float], list[bool]]:
    """Returns the reward of each conversation, and whether it was cut to the model's length.

    All processes must call it, with the same conversations.

    Raises:
      UserError: The template of the reward model cannot render a conversation.
    """
    self.load()
    assert self._loaded is not None
    with self._model.naming():
      found = [self._model.rows.corpus.scored(*one) for one in conversations]
    phases.enter("reward" if self._is_compiled else "compile")
    most = self._scorer.seq_len
    rewards = self._scorer.scores(self._loaded[0], [tokens[:most] for tokens in found])
    self._is_compiled = True
    return rewards, [len(tokens) > most for tokens in found]
