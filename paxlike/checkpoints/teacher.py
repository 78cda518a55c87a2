# SPDX-License-Identifier: Apache-2.0
"""The teacher of a distillation: the trained model of another folder."""

import dataclasses
import functools
import re
from typing import ClassVar, NamedTuple

import jax
from etils import epath

from paxlike.checkpoints.saved_model import SavedModel, read_for_compute
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers import lora
from paxlike.layers.decoder import Decoder
from paxlike.layers.module import Definition, Params
from paxlike.layers.reward_model import RewardModel

_NOTHING = "(?!)"  # As a pattern of trained weights.


class Taught(NamedTuple):
  """A restored teacher.

  Attributes:
    params: Its weights, in their compute dtypes.
    record: JSON of its folder, step and checksum.
  """

  params: Params
  record: str


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher(SavedModel):
  """A model whose predictions another one learns. Building it reads nothing."""

  knob: ClassVar[str] = "TEACHER"
  what: ClassVar[str] = "teacher"
  file: ClassVar[str] = "teacher.json"

  @functools.cached_property
  def definition(self) -> Definition:
    """The model, as config.json of the folder defines it, with frozen weights.

    Raises:
      UserError: The file cannot be read, or its model is not one of a teacher.
    """
    if isinstance(self.model, RewardModel):
      raise UserError(f"TEACHER={self.path} is a RewardModel: it predicts no tokens.")
    definition = Definition(self.model, trained=_NOTHING)
    if any(re.search(lora.WEIGHTS, name) for name in definition.weights):
      raise UserError(
        f"TEACHER={self.path} holds LoRA adapters without their base: merge them first"
        " (paxlike-convert --from=paxlike, then --from=hf)."
      )
    return definition

  def check(self, model: Decoder, seq_len: int, *, same_tokenizer: bool):
    """Checks the checkpoint, and that `model` can learn from it; reads no array.

    Args:
      model: The student.
      seq_len: Tokens of a sequence.
      same_tokenizer: Whether both are known to have the same tokenizer, so that vocabularies of
        different sizes are padded differently.

    Raises:
      UserError: There is no such checkpoint, or the teacher has another vocabulary.
    """
    teacher: Decoder = self.model
    if teacher.vocab_size != model.vocab_size and not same_tokenizer:
      raise UserError(
        f"TEACHER={self.path} has a vocabulary of {teacher.vocab_size} tokens, and the model of"
        f" {model.vocab_size}, padding included: take a teacher with the same VOCAB_SIZE, or a"
        " converted model with the tokenizer of the data."
      )
    with self.naming():
      teacher.check_data(seq_len, None)
      self.saved.find(self.step)

  def load(self, devices: jax.sharding.Mesh, run: epath.Path | None = None) -> Taught:
    """Returns the teacher on a mesh; if the run in `run` had one before, that one.

    Raises:
      UserError: The checkpoint is missing, damaged or of another model, or not the one before.
    """
    definition = self.definition
    with self.naming():
      step, params = read_for_compute(self.saved, self.step_of(run), definition, devices)
      return Taught(definition.prepare(params), self.record(step))
