# SPDX-License-Identifier: Apache-2.0
"""A trainer is a value."""

import dataclasses

import pytest

from paxlike import registry, run_mode
from paxlike.training.execution import Execution
from paxlike.training.trainer import Trainer


def test_a_trainer_that_is_built_does_not_change():
  trainer: Trainer = run_mode.build_trainer(registry.find("Gpt3_52k")().trainer())
  assert trainer.devices is trainer.devices
  for name in [*vars(trainer), "another"]:
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(trainer, name, None)


def test_another_trainer_keeps_what_is_not_replaced_and_nothing_that_follows_from_it():
  trainer: Trainer = run_mode.build_trainer(
    registry.find("Gpt3_52k")(PERCORE_BATCH_SIZE=1).trainer()
  )
  batch, execution = trainer.placer.rows, Execution(compiler_options={"xla_dump_to": "x"})
  other = dataclasses.replace(trainer, execution=execution)
  other = dataclasses.replace(other, percore_batch_size=2)
  assert other.execution is execution and trainer.execution == Execution()
  assert len(other.placer.rows) == 2 * len(batch)
