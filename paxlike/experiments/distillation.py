# SPDX-License-Identifier: Apache-2.0
"""Mixins of distillation.

On texts or conversations: `class MyStudent(Distillation, datasets.Jsonl, SmallQwen25)`; on answers
of the student to prompts: `class MyStudent(OnPolicyDistillation, PromptFiles, SmallQwen25)`.
"""

from typing import Any

import fiddle as fdl

from paxlike.checkpoints.teacher import Teacher
from paxlike.config import ranges
from paxlike.experiment import Experiment
from paxlike.experiments.reinforcement import Reinforcement
from paxlike.inference.sampling import Sampling
from paxlike.training import objectives
from paxlike.training.reinforcement.rollouts import Rollouts


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


class OnPolicyDistillation(Distillation, Reinforcement):
  """Distillation on answers that the student samples (GKD, Agarwal et al., 2023).

  The loss is on the answers; there is no reward, except that of the prompts to evaluate on.
  """

  GROUP_SIZE = 1

  def has_values(self) -> bool:
    return False

  def objective(self) -> fdl.Config[objectives.OnPolicyGkd]:
    given: Any = fdl.ordered_arguments(super().objective())
    sampling = fdl.Config(Sampling, temperature=self.ROLLOUT_TEMPERATURE)
    return fdl.Config(objectives.OnPolicyGkd, sampling=sampling, **given)

  def rollouts(self) -> fdl.Config[Rollouts]:
    return self.answers()
