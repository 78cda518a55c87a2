# SPDX-License-Identifier: Apache-2.0
"""The teacher of a distillation: the trained model of another folder."""

import dataclasses
import functools
import json
import os
import re
from typing import Any, NamedTuple

import jax
from etils import epath
from flax import nnx

from paxlike import file_io
from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.warm_start import read_found, read_params
from paxlike.config import building, graph_file, ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers import lora
from paxlike.layers.attention.attention import Attention
from paxlike.layers.attention.auto import auto
from paxlike.layers.attention.latent_attention import LatentAttention
from paxlike.layers.decoder import Decoder
from paxlike.layers.module import Definition, Params
from paxlike.layers.moe.dispatch import dropless
from paxlike.layers.moe.moe import Moe
from paxlike.layers.reward_model import RewardModel

RECORD = "teacher.json"
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
class Teacher:
  """A model whose predictions another one learns. Building it reads nothing.

  Attributes:
    path: The folder of a run, or of a model that paxlike-convert made.
    step: The checkpoint's step; None: the newest.
  """

  path: ranges.Path
  step: ranges.NonNegative | None = None

  @functools.cached_property
  def definition(self) -> Definition:
    """The model, as config.json of the folder defines it, with frozen weights.

    Pipeline stages and layers for multi-token prediction are left out, experts drop no tokens, and
    attention kernels depend on the devices.

    Raises:
      UserError: The file cannot be read, or its model is not one of a teacher.
    """
    file = self._folder / "config.json"
    if not file.exists():
      raise UserError(
        f"TEACHER={self.path} has no config.json: give the folder of a run, or of a model that"
        " paxlike-convert made."
      )
    try:
      graph = graph_file.read_model(file)
      if getattr(graph, "mtp", None) is not None:
        graph.mtp = None
      if getattr(graph.stack, "pipeline", None) is not None:
        graph.stack.pipeline = None
      model = building.build(graph, source="its model")
      for _, module in nnx.iter_modules(model):
        part: Any = module
        if isinstance(module, Moe):
          part.dispatch = dropless
        if isinstance(module, Attention | LatentAttention):
          part.kernel = auto
    except UserError as error:
      raise UserError(f"TEACHER={self.path}: {error}") from error
    if not isinstance(model, Decoder) or isinstance(model, RewardModel):
      raise UserError(f"TEACHER={self.path} is a {type(model).__name__}: it predicts no tokens.")
    definition = Definition(model, trained=_NOTHING)
    if any(re.search(lora.WEIGHTS, name) for name in definition.weights):
      raise UserError(
        f"TEACHER={self.path} holds LoRA adapters without their base: merge them first"
        " (paxlike-convert --from=paxlike, then --from=hf)."
      )
    return definition

  @property
  def model(self) -> Decoder:
    """The module of `definition`."""
    model: Any = self.definition.module
    return model

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
    teacher = self.model
    if teacher.vocab_size != model.vocab_size and not same_tokenizer:
      raise UserError(
        f"TEACHER={self.path} has a vocabulary of {teacher.vocab_size} tokens, and the model of"
        f" {model.vocab_size}, padding included: take a teacher with the same VOCAB_SIZE, or a"
        " converted model with the tokenizer of the data."
      )
    try:
      teacher.check_data(seq_len, None)
      self._saved.find(self.step)
    except UserError as error:
      raise UserError(f"TEACHER={self.path}: {error}") from error

  def load(self, devices: jax.sharding.Mesh, run: epath.Path | None = None) -> Taught:
    """Returns the teacher on a mesh; if the run in `run` had one before, that one.

    Raises:
      UserError: The checkpoint is missing, damaged or of another model, or not the one before.
    """
    saved, definition = self._saved, self.definition
    before = None if run is None else _recorded(run / RECORD)
    try:
      step = self.step
      if before is not None:
        step = before["step"]
        if self.step not in (None, step) or not _is_at(saved, step, before.get("identity")):
          raise UserError(
            f"it is not the teacher of the steps so far, checkpoint {step} of {before['path']}."
            f" To go on with another one, remove {RECORD} of the run's folder."
          )
      step, (params, _) = read_found(
        saved,
        step,
        lambda step: read_params(
          saved,
          step,
          definition,
          devices,
          for_compute=True,
          unread=layout_conversion.all_but_weights,
        ),
      )
    except UserError as error:
      raise UserError(f"TEACHER={self.path}: {error}") from error
    record = {"path": os.fspath(self._folder), "step": step, "identity": saved.at(step).identity()}
    return Taught(definition.prepare(params), json.dumps(record, indent=2) + "\n")

  @property
  def _folder(self) -> epath.Path:
    return file_io.absolute(self.path)

  @property
  def _saved(self) -> Checkpoints:
    return Checkpoints(self._folder / "checkpoints", keep=None)


def _is_at(saved: Checkpoints, step: int, identity: str | None) -> bool:
  """Whether there is a checkpoint of this step and checksum."""
  if step not in saved.steps():
    return False
  return identity in (None, saved.at(step).identity())


def _recorded(file: epath.Path) -> dict[str, Any] | None:
  """Returns the record of a run's teacher; None if it has none yet.

  Raises:
    UserError: It is damaged.
  """
  if not file.exists():
    return None
  try:
    record = json.loads(file_io.read_bytes(file))
    if type(record["step"]) is not int or "path" not in record:
      raise ValueError("it names no checkpoint")
    return record
  except (OSError, *file_io.MALFORMED) as error:
    raise UserError(f"{file}, the record of the run's teacher, is damaged: {error!r}.") from error
