# SPDX-License-Identifier: Apache-2.0
"""Mixins of distillation: `class MyStudent(Distillation, datasets.Jsonl, SmallQwen25)`."""

import fiddle as fdl

from paxlike.checkpoints.teacher import Teacher
from paxlike.config import ranges
from paxlike.experiment import Experiment
from paxlike.training import objectives


class Distillation(Experiment):
  """Training on the next-token distributions of a teacher, a model with the same vocabulary."""

  #: Folder of a run or converted model that is the teacher. None: the data have its predictions
  #: (scripts/prepare_data.py --teacher_top_k).
  TEACHER: ranges.Path | None = None
  TEACHER_STEP: ranges.NonNegative | None = None  #: Its checkpoint. None: the newest.
  #: Of the generalized Jensen-Shannon divergence; 0: forward KL(teacher || student), 1: reverse.
  DISTILLATION_BETA: ranges.Fraction = 0.5
  DISTILLATION_TEMPERATURE: ranges.PositiveFloat = 1.0  #: Divides the logits of both models.
  DISTILLATION_CROSS_ENTROPY: ranges.NonNegativeFloat = 0.0  #: Weight of the data's own loss.

  def objective(self) -> fdl.Config[objectives.Gkd]:
    return fdl.Config(
      objectives.Gkd,
      teacher=self.teacher(),
      beta=self.DISTILLATION_BETA,
      temperature=self.DISTILLATION_TEMPERATURE,
      cross_entropy=self.DISTILLATION_CROSS_ENTROPY,
    )

  def teacher(self) -> fdl.Config[Teacher] | None:
    """Returns the teacher; None: its predictions are in the data."""
    if self.TEACHER is None:
      return None
    return fdl.Config(Teacher, path=self.TEACHER, step=self.TEACHER_STEP)
