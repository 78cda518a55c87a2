# SPDX-License-Identifier: Apache-2.0
"""The knobs of the optimizer and of its schedule, and the methods that return both."""

import itertools
from typing import Any, Literal

import fiddle as fdl

from paxlike.config import ranges
from paxlike.config.knobs import UNSET
from paxlike.errors import UserError
from paxlike.knob_groups.run import RunKnobs
from paxlike.training import optimizers


class ScheduleKnobs(RunKnobs):
  """Schedule: the learning rate at each step."""

  LEARNING_RATE: ranges.Rate = UNSET  #: Peak of the schedule.
  #: Learning-rate schedule; others can be registered.
  LR_SCHEDULE: optimizers.ScheduleName = "linear_rampup_cosine_decay"
  LR_COS_WARMUP: ranges.NonNegative = 4000  #: Linear warmup steps of the cosine schedule.
  #: Step at which the cosine decay starts. None: LR_COS_WARMUP + 1.
  LR_COS_DECAY_START: ranges.NonNegative | None = None
  #: Step at which the cosine decay ends. None: MAX_STEPS.
  LR_COS_DECAY_END: ranges.NonNegative | None = None
  LR_COS_MIN_RATIO: ranges.Fraction = 0.1  #: Final learning rate as a fraction of the peak.
  LR_LRED_WARMUP: ranges.NonNegative = 4000  #: Warmup steps of the exponential schedule.
  #: Step at which the exponential decay starts. None: LR_LRED_WARMUP + 1.
  LR_LRED_DECAY_START: ranges.NonNegative | None = None
  #: Step at which the exponential decay ends. None: MAX_STEPS.
  LR_LRED_DECAY_END: ranges.NonNegative | None = None
  LR_LRED_MIN_RATIO: ranges.Epsilon = 0.1  #: Final learning rate as a fraction of the peak.

  def schedule(self) -> fdl.Config:
    """Returns the learning-rate schedule.

    Raises:
      UserError: The decay starts before the end of the warmup, or ends before it starts.
    """
    if make := optimizers.SCHEDULES.get(self.LR_SCHEDULE):
      return make(self)
    peak = self.LEARNING_RATE
    if self.LR_SCHEDULE == "constant":
      return fdl.Config(optimizers.constant, peak=peak)
    if self.LR_SCHEDULE == "linear_rampup_cosine_decay":
      function, prefix, warmup = optimizers.linear_rampup_cosine_decay, "COS", self.LR_COS_WARMUP
      start, end = self.LR_COS_DECAY_START, self.LR_COS_DECAY_END
      ratio = self.LR_COS_MIN_RATIO
    else:
      function, prefix = optimizers.linear_rampup_exponential_decay, "LRED"
      warmup, ratio = self.LR_LRED_WARMUP, self.LR_LRED_MIN_RATIO
      start, end = self.LR_LRED_DECAY_START, self.LR_LRED_DECAY_END
    steps = [("WARMUP", warmup), ("DECAY_START", start), ("DECAY_END", end)]
    given = [(f"LR_{prefix}_{name}", step) for name, step in steps if step is not None]
    for (name, step), (later, sooner) in itertools.pairwise(given):
      if sooner < step:
        raise UserError(
          f"{later}={sooner} is below {name}={step}: the learning rate rises for"
          f" LR_{prefix}_WARMUP steps, and falls from LR_{prefix}_DECAY_START to"
          f" LR_{prefix}_DECAY_END. Change one of them."
        )
    if end is None:
      end = max(self.max_steps(), start or 0)
    start = min(warmup + 1, ranges.INT32) if start is None else start
    return fdl.Config(
      function, peak=peak, warmup=warmup, decay_start=start, decay_end=end, min_ratio=ratio
    )


class OptimizerKnobs(ScheduleKnobs):
  """Optimizer: the rule that makes a step of gradients, weight decay and gradient clipping."""

  OPTIMIZER: optimizers.OptimizerName = "adamw"  #: Optimizer; others can be registered.
  ADAM_BETA1: ranges.Probability = 0.9  #: Decay rate of the first moment.
  ADAM_BETA2: ranges.Probability = 0.95  #: Decay rate of the second moment.
  ADAM_EPSILON: ranges.Epsilon = 1e-8  #: Added outside the square root.
  #: Storage dtype of Adam's moments and Muon's momentum; bfloat16 uses stochastic rounding.
  ADAM_MOMENT_DTYPE: optimizers.MomentDtype = "float32"
  MUON_MOMENTUM: ranges.Probability = 0.95  #: Decay rate of Muon's momentum.
  #: Scale of Muon's updates: "rms" is that of Adam, whose learning rates serve; "width" is
  #: sqrt(max(1, outputs / inputs)).
  MUON_SCALE: optimizers.Scale = "rms"
  ADEMAMIX_BETA3: ranges.Probability = 0.9999  #: Decay rate of AdEMAMix's slow moment.
  ADEMAMIX_ALPHA: ranges.NonNegativeFloat = 5.0  #: Weight of AdEMAMix's slow moment.
  #: Steps in which AdEMAMix's slow moment grows to its weight. None: MAX_STEPS.
  ADEMAMIX_WARMUP: ranges.NonNegative | None = None
  LION_BETA1: ranges.Probability = 0.9  #: Weight of the momentum in the sign of Lion.
  LION_BETA2: ranges.Probability = 0.99  #: Decay rate of Lion's momentum.
  ADAFACTOR_DECAY: ranges.Probability = 0.8  #: Exponent of the decay of Adafactor's moments.
  #: Decay rate of Adafactor's first moment. None: it has none.
  ADAFACTOR_MOMENTUM: ranges.Probability | None = None
  #: Shard the optimizer state over the mesh axis data too (ZeRO-1).
  SHARD_OPTIMIZER_OVER_DATA: bool = False
  #: Offload the optimizer state to host memory between updates.
  OPTIMIZER_ON_HOST: bool = False
  WEIGHT_DECAY: ranges.Weight = 0.1  #: Decoupled weight decay.
  WEIGHT_DECAY_ON: Literal["everything", "matrices"] = "everything"  #: Which weights decay.
  #: Maximum global gradient norm. None: no clipping.
  CLIP_GRADIENT_NORM_TO_VALUE: ranges.PositiveFloat | None = 1.0

  def optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    """Returns the optimizer with its learning-rate schedule."""
    if make := optimizers.OPTIMIZERS.get(self.OPTIMIZER):
      return make(self)
    shared = {
      "learning_rate": self.schedule(),
      "weight_decay": self.WEIGHT_DECAY,
      "decayed": getattr(optimizers, self.WEIGHT_DECAY_ON),
      "clip_norm": self.CLIP_GRADIENT_NORM_TO_VALUE,
      "over_data": self.SHARD_OPTIMIZER_OVER_DATA,
      "on_host": self.OPTIMIZER_ON_HOST,
    }
    if self.OPTIMIZER == "adamw":
      return fdl.Config(optimizers.adamw, **self._adam(), **shared)
    if self.OPTIMIZER == "schedule_free_adamw":
      b1, rest = self.ADAM_BETA1, self._adam() | {"b1": 0.0}
      inner = fdl.Config(optimizers.adamw, **rest, **shared)
      return fdl.Config(optimizers.schedule_free, inner, b1=b1)
    return fdl.Config(optimizers.descent, rule=self._rule(), **shared)

  def _rule(self) -> fdl.Config:
    if self.OPTIMIZER == "muon":
      return fdl.Config(
        optimizers.muon,
        others=fdl.Config(optimizers.adam, **self._adam()),
        momentum=self.MUON_MOMENTUM,
        scale=self.MUON_SCALE,
        moment_dtype=self.ADAM_MOMENT_DTYPE,
        over_data=self.SHARD_OPTIMIZER_OVER_DATA,
      )
    if self.OPTIMIZER == "lion":
      return fdl.Config(optimizers.lion, b1=self.LION_BETA1, b2=self.LION_BETA2)
    if self.OPTIMIZER == "adafactor":
      return fdl.Config(
        optimizers.adafactor, decay=self.ADAFACTOR_DECAY, momentum=self.ADAFACTOR_MOMENTUM
      )
    warmup = self.ADEMAMIX_WARMUP
    return fdl.Config(
      optimizers.ademamix,
      b1=self.ADAM_BETA1,
      b2=self.ADAM_BETA2,
      b3=self.ADEMAMIX_BETA3,
      alpha=self.ADEMAMIX_ALPHA,
      eps=self.ADAM_EPSILON,
      warmup=self.max_steps() if warmup is None else warmup,
    )

  def _adam(self) -> dict[str, Any]:
    return {
      "b1": self.ADAM_BETA1,
      "b2": self.ADAM_BETA2,
      "eps": self.ADAM_EPSILON,
      "moment_dtype": self.ADAM_MOMENT_DTYPE,
    }
