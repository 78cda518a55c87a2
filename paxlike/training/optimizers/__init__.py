# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules, most of them composed from optax."""

from paxlike.training.optimizers.averages import averaged, schedule_free
from paxlike.training.optimizers.elementwise import MomentDtype, adam, adamw, ademamix, lion
from paxlike.training.optimizers.factored import adafactor
from paxlike.training.optimizers.guard import Guard
from paxlike.training.optimizers.matrix import Scale, muon
from paxlike.training.optimizers.optimizer import (
  OPTIMIZERS,
  SCHEDULES,
  Optimizer,
  OptimizerName,
  ScheduleName,
  Transform,
  Weights,
  chain,
  descent,
  everything,
  guarded,
  matrices,
  register_optimizer,
  register_schedule,
  resolved,
)
from paxlike.training.optimizers.parametrization import Parametrization
from paxlike.training.optimizers.schedules import (
  DecayShape,
  Schedule,
  constant,
  cosine_restarts,
  inverse_sqrt,
  linear,
  linear_rampup_cosine_decay,
  linear_rampup_exponential_decay,
  ramp,
  warmup_stable_decay,
)

__all__ = [
  "OPTIMIZERS",
  "SCHEDULES",
  "DecayShape",
  "Guard",
  "MomentDtype",
  "Optimizer",
  "OptimizerName",
  "Parametrization",
  "Scale",
  "Schedule",
  "ScheduleName",
  "Transform",
  "Weights",
  "adafactor",
  "adam",
  "adamw",
  "ademamix",
  "averaged",
  "chain",
  "constant",
  "cosine_restarts",
  "descent",
  "everything",
  "guarded",
  "inverse_sqrt",
  "linear",
  "linear_rampup_cosine_decay",
  "linear_rampup_exponential_decay",
  "lion",
  "matrices",
  "muon",
  "ramp",
  "register_optimizer",
  "register_schedule",
  "resolved",
  "schedule_free",
  "warmup_stable_decay",
]
