# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a run, found before anything is computed or written."""

from typing import Any

from paxlike import memory_check, mesh, pipelined, requirements
from paxlike.errors import UserError


def check(trainer: Any, *, training: bool):
  """Checks a `Trainer`, its devices and its data.

  Raises:
    UserError: The mesh, the batch or a data set cannot work, or a device has too little memory.
  """
  check_step(trainer, training=training)
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
  if training and trainer.sample_prompt is not None:
    try:
      trainer.check_prompts([trainer.sample_prompt])
    except UserError as error:
      raise UserError(f"SAMPLE_PROMPT (sample_prompt): {error}") from None


def check_step(trainer: Any, *, training: bool):
  """Checks whether there is something to train, and whether the devices can share a batch.

  Raises:
    UserError: There is not, or they cannot.
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
