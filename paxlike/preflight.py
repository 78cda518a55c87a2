# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a run, found before anything is computed or written."""

import re
from typing import Any

from paxlike import memory_check, mesh, pipelined, requirements
from paxlike.errors import UserError

# Of an eval set: `eval_out` and `summaries` have folders of this name.
_NAME = re.compile(r"(?!\.\.?$)[\w.-]+")
_MOST_BYTES = 200  # Of 255 of a file's name.


def check(trainer: Any, *, training: bool):
  """Checks a `Trainer`, its devices and its data.

  Raises:
    UserError: The mesh, the batch or a data set cannot work, an eval set has no name for a folder
      or no end, or a device has too little memory.
  """
  check_setup(trainer, training=training)
  for name in trainer.eval_data:
    _check_name(name)
  if training:
    state, batch = trainer.abstract()
    memory_check.check(trainer.devices, state, batch, parts=trainer.accumulation_steps)
  if trainer.restore is not None:
    trainer.restore.check(trainer.definition)
  if trainer.best is not None:
    trainer.best.check(trainer.eval_data)
  for data in trainer.datasets(training=training):
    trainer.model.check_data(data.seq_len, data.vocab_size)
    data.check()
  for name, eval_set in trainer.eval_data.items():
    if eval_set.num_batches is None and eval_set.dataset.is_endless:
      raise UserError(
        f"the eval set {name} never ends: give its EvalSet num_batches, as by"
        f" --fdl.eval_data[{name}].num_batches=16."
      )
  if training and trainer.sample_prompt is not None:
    try:
      trainer.check_prompts([trainer.sample_prompt])
    except UserError as error:
      raise UserError(f"SAMPLE_PROMPT (sample_prompt): {error}") from None


def _check_name(name: object):
  is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
  if not is_name or len(str(name).encode()) > _MOST_BYTES:
    raise UserError(
      f"eval_data has a set named {name!r:.300}: expected up to {_MOST_BYTES} letters, digits, _, -"
      " and dots, since its results go to a folder of this name. Names are keys of eval_data() and"
      " of DATA_PATHS, or EVAL_SPLIT."
    )


def check_setup(trainer: Any, *, training: bool):
  """Checks what needs neither data nor memory: model, mesh and batch.

  Raises:
    UserError: There is nothing to train, or the devices cannot share a batch.
  """
  if training and trainer.train_data is None:
    raise UserError("this experiment has no training data (train_data): it is for --mode=eval.")
  if training and trainer.read_only:
    raise UserError(
      "hold() is for --mode=eval and --mode=decode: weight-only quantized weights cannot be"
      " trained."
    )
  if training and not trainer.definition.num_trained:
    raise UserError(
      f"trained={trainer.trained!r} is in the name of no weight: nothing would be trained."
    )
  if training:
    requirements.check_context(trainer.model, dict(trainer.devices.shape))
  mesh.check_batch(
    trainer.devices,
    trainer.batch_size,
    accumulation_steps=trainer.accumulation_steps,
    microbatches=pipelined.check(trainer.definition, trainer.devices) if training else 1,
  )
