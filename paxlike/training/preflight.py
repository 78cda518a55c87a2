# SPDX-License-Identifier: Apache-2.0
"""Checks of a run before anything is computed or written."""

import os
import re
import shlex
import unicodedata
from typing import Any

from etils import epath

from paxlike import file_io
from paxlike.checkpoints.teacher import Teacher
from paxlike.data.prepared import PreparedRows
from paxlike.data.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from paxlike.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from paxlike.data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from paxlike.devices import mesh
from paxlike.errors import UserError
from paxlike.training import decode_mode, memory_check, pipeline_loss, ramp, requirements
from paxlike.training.objectives import Gkd, NextToken, OnPolicyGkd
from paxlike.training.reinforcement import preflight as rollout_checks

# Tokenizers that split it alike are the same.
_PROBE = "The quick brown fox jumps over 1,234.56 lazy dogs;\n  na\u00efve \u4e2d\u6587 f(x**2)"
_MOST_BYTES = 200  # Limit of an eval set's name; file names are limited to 255.


def check(trainer: Any, *, training: bool):
  """Checks a `Trainer`, its devices and its data.

  Raises:
    UserError: The mesh, the batch or a data set is invalid, an eval set is endless or its name
      cannot be a folder's, or a device has too little memory.
  """
  check_setup(trainer, training=training)
  rollout_checks.check_reward_models(trainer, training=training)
  for name in trainer.eval_data:
    check_name(name)
  if training and trainer.profile is not None:
    platform = trainer.devices.devices.flat[0].platform
    trainer.profile.check(num_steps=trainer.num_steps, platform=platform)
  if training:
    state, batch = trainer.abstract()
    memory_check.check(trainer.devices, state, batch, parts=trainer.accumulation_steps)
  if training:
    _check_mtp(trainer)
  # A run with checkpoints of its own can be evaluated without the weights that it started from.
  if trainer.restore is not None and (training or trainer.restore.saved.steps()):
    trainer.restore.check(trainer.definition)
    restore = trainer.restore
    if restore.matches("embedding.table"):
      named = f"CHECKPOINT_RESTORE_PATH={restore.path}"
      _check_tokenizer(trainer, restore.folder.parent, named, training=training)
  if trainer.best is not None:
    trainer.best.check(trainer.eval_data)
  for data in trainer.datasets(training=training):
    trainer.model.check_data(data.seq_len, data.vocab_size)
    data.check()
  for name, eval_set in trainer.eval_data.items():
    if eval_set.num_batches is None and eval_set.dataset.is_endless:
      raise UserError(
        f"the eval set {name} never ends: set num_batches of its EvalSet, as by"
        f" {_edit(name, 'num_batches=16')}."
      )
  if training and trainer.sample_prompt is not None:
    try:
      decode_mode.check(trainer, [trainer.sample_prompt])
    except UserError as error:
      raise UserError(f"SAMPLE_PROMPT (sample_prompt): {error}") from None


def _check_mtp(trainer: Any):
  """Raises a UserError if layers for multi-token prediction would keep their initial weights."""
  frozen = [name for name in trainer.definition.frozen if name.startswith("mtp.")]
  restore = trainer.restore
  if frozen and (restore is None or not all(map(restore.matches, frozen))):
    raise UserError(
      f"MTP_NUM_LAYERS: {frozen[0]} is neither trained (USE_LORA or trained=) nor restored, so its"
      " initial value would be used: set MTP_NUM_LAYERS=0."
    )


def _check_teacher(trainer: Any, objective: Gkd):
  """Raises a UserError if there is no teacher that the model can learn from."""
  is_on_policy = isinstance(objective, OnPolicyGkd)
  weighs = trainer.model.z_loss or trainer.model.label_smoothing
  if weighs and not objective.cross_entropy and not is_on_policy:
    raise UserError(
      "Z_LOSS and LABEL_SMOOTHING belong to the cross-entropy: set DISTILLATION_CROSS_ENTROPY, its"
      " weight, or leave them out."
    )
  data, teacher = trainer.train_data, objective.teacher
  before = data.teacher if isinstance(data, PreparedRows) else None
  if teacher is not None:
    check_teacher(trainer, teacher)
    return
  if is_on_policy:
    raise UserError("TEACHER is not set: it is the folder of a run or of a converted model.")
  if before is None:
    raise UserError(
      "TEACHER is not set, and the data have no predictions of a teacher: set it, or prepare the"
      " data by scripts/prepare_data.py --teacher_top_k=K."
    )
  if before["temperature"] != objective.temperature:
    raise UserError(
      f"DISTILLATION_TEMPERATURE={objective.temperature}, but the predictions in"
      f" DATA_PATH were made at {before['temperature']}."
    )


def check_teacher(trainer: Any, teacher: Teacher):
  """Checks that a trainer's model can learn from a teacher; reads no array.

  Raises:
    UserError: It cannot.
  """
  named, data = f"TEACHER={teacher.path}", trainer.train_data
  folder = file_io.absolute(teacher.path)
  _check_tokenizer(trainer, folder, named, training=True)
  same = _has_tokenizer(folder, data.tokenizer)
  teacher.check(trainer.model, data.seq_len, same_tokenizer=same)
  try:
    requirements.check(teacher.model, list(trainer.devices.devices.flat))
  except UserError as error:
    raise UserError(f"{named}: {error}") from error


def _has_tokenizer(folder: epath.Path, tokenizer: Tokenizer | None) -> bool:
  """Whether a run or converted model has this tokenizer: as many ids, and the same for a text."""
  found = _tokenizer_of(folder)
  if found is None or tokenizer is None:
    return False
  kind, path = found
  other = (HuggingFaceTokenizer if kind == "huggingface" else SentencePieceTokenizer)(path)
  ids, expected = (list(one.encode(_PROBE)) for one in (other, tokenizer))
  return other.vocab_size == tokenizer.vocab_size and ids == expected


def _check_tokenizer(trainer: Any, folder: epath.Path, named: str, *, training: bool):
  """Raises a UserError if byte ids would index the embedding of a model with another tokenizer."""
  found = _tokenizer_of(folder)
  if found is None:
    return
  kind, path = found
  for data in trainer.datasets(training=training):
    if isinstance(data.tokenizer, ByteTokenizer):
      raise UserError(
        f"TOKENIZER=byte, but the model of {named} has a"
        f" tokenizer: give --fdl.TOKENIZER={kind} --fdl.VOCAB_PATH={shlex.quote(path)}"
      )


def _tokenizer_of(folder: epath.Path) -> tuple[str, str] | None:
  """Returns TOKENIZER and VOCAB_PATH of the run or converted model in a folder, if it has them."""
  if file_io.is_remote(folder):
    return None
  for place in (folder, folder / "tokenizer"):
    for kind, suffix in (("huggingface", "tokenizer.json"), ("sentencepiece", ".model")):
      names = sorted(name.name for name in file_io.beginning_with(place, ""))
      if name := next((name for name in names if name.endswith(suffix)), None):
        return kind, os.fspath(place / name)
  return None


def check_name(name: object):
  """Checks the name of an eval set: `eval_out` and `summaries` have folders of this name.

  Raises:
    UserError: It is not a string, or not a valid or readable folder name.
  """
  if not isinstance(name, str):
    expected = "a text"
  elif name.strip() != name or name in ("", ".", "..") or set(name) & set("/\\"):
    expected = "the name of a folder, without / and \\ and without white space at either end"
  elif any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
    expected = "a name without control characters"
  elif len(name.encode()) > _MOST_BYTES:
    expected = f"a name of at most {_MOST_BYTES} bytes"
  else:
    return
  raise UserError(
    f"eval_data has a set named {name!r:.300}: expected {expected}, since its results go to a"
    " folder of this name. Names are keys of eval_data() and of DATA_PATHS, or EVAL_SPLIT."
  )


def _edit(name: str, argument: str) -> str:
  """Returns the flag, for a shell, that sets an argument of the eval set of this name."""
  is_plain = re.fullmatch(r"[\w.-]*[^\W\d][\w.-]*", name) is not None
  quoted = repr(name) if '"' in name else f'"{name}"'
  flag = f"--fdl.eval_data[{name if is_plain else quoted}].{argument}"
  return flag if is_plain else shlex.quote(flag)


def check_setup(trainer: Any, *, training: bool):
  """Checks model, mesh and batch size, without reading data.

  Raises:
    UserError: There is nothing to train, or the batch cannot be sharded over the devices.
  """
  if training and trainer.train_data is None:
    raise UserError("this experiment has no training data (train_data): it is for --mode=eval.")
  if training and trainer.read_only:
    raise UserError(
      "quantize_weights() is for --mode=eval and --mode=decode: weight-only quantized weights"
      " cannot be trained."
    )
  if training and not trainer.definition.num_trained:
    raise UserError(f"trained={trainer.trained!r} matches no weight: nothing would be trained.")
  if training and trainer.optimizer.rolls_back and not trainer.saving:
    raise UserError(
      "ON_SPIKE=rollback goes on from checkpoints: leave --enable_checkpoint_saving=false out, or"
      " choose ON_SPIKE=skip."
    )
  if training and trainer.model.mtp is not None and not isinstance(trainer.objective, NextToken):
    raise UserError(
      f"MTP_NUM_LAYERS has a loss with the objective NextToken, not with"
      f" {type(trainer.objective).__name__}: set it to 0."
    )
  if training and isinstance(trainer.objective, Gkd):
    _check_teacher(trainer, trainer.objective)
  if training and trainer.rollouts is not None:
    rollout_checks.check(trainer)
  if training:
    requirements.check_context(trainer.model, dict(trainer.devices.shape))
  microbatches = pipeline_loss.check(trainer.definition, trainer.devices) if training else 1
  parts = {"accumulation_steps": trainer.accumulation_steps, "microbatches": microbatches}
  mesh.check_batch(trainer.devices, trainer.batch_size, **parts)
  for stage in trainer.stages[:-1] if training else []:
    with ramp.naming(stage.end):
      mesh.check_batch(trainer.devices, stage.trainer.batch_size, **parts)
