# SPDX-License-Identifier: Apache-2.0
"""The knobs of the optimizer and of its schedule, and the methods that return both."""

import itertools
from typing import Any, Literal

import fiddle as fdl

from paxlike.checkpoints.branch import Branch, step_in
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
  #: Warmup steps of linear, inverse_sqrt, cosine_restarts and wsd.
  LR_WARMUP: ranges.NonNegative = 1000
  #: Final learning rate of linear, cosine_restarts and wsd as a fraction of the peak.
  LR_MIN_RATIO: ranges.Fraction = 0.0
  LR_CYCLES: ranges.Positive = 4  #: Cycles of the schedule cosine_restarts.
  #: Share of MAX_STEPS, at their end, in which the rate of wsd decays; 0: no decay. Not used with
  #: DECAY_FROM.
  LR_WSD_DECAY: ranges.Fraction = 0.2
  LR_WSD_SHAPE: optimizers.DecayShape = "sqrt"  #: Decay by 1 - x, 1 - sqrt(x) or a cosine.
  #: Checkpoint of another run, RUN/checkpoints/checkpoint_N, that a new run goes on from. The rate
  #: of wsd then decays from its step to MAX_STEPS. None: the run starts anew.
  DECAY_FROM: ranges.Path | None = None

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
    if not self.LR_SCHEDULE.startswith("linear_rampup"):
      return self._simple_schedule()
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

  def _simple_schedule(self) -> fdl.Config:
    """Returns a schedule that begins with LR_WARMUP and, but for one, ends in MAX_STEPS."""
    peak, warmup, steps = self.LEARNING_RATE, self.LR_WARMUP, self.max_steps()
    if self.LR_SCHEDULE == "inverse_sqrt":
      return fdl.Config(optimizers.inverse_sqrt, peak=peak, warmup=warmup)
    end = max(steps, warmup)
    shared = {"peak": peak, "warmup": warmup, "decay_end": end, "min_ratio": self.LR_MIN_RATIO}
    if self.LR_SCHEDULE == "linear":
      return fdl.Config(optimizers.linear, **shared)
    if self.LR_SCHEDULE == "cosine_restarts":
      return fdl.Config(optimizers.cosine_restarts, cycles=self.LR_CYCLES, **shared)
    start = self._decay_start(steps)
    return fdl.Config(
      optimizers.warmup_stable_decay, decay_start=start, shape=self.LR_WSD_SHAPE, **shared
    )

  def _decay_start(self, steps: int) -> int:
    """Returns the step at which the rate of wsd begins to decay."""
    start = steps - round(self.LR_WSD_DECAY * steps)
    if self.DECAY_FROM is None:
      return start
    step = step_in(self.DECAY_FROM)
    if step >= steps and self.NUM_EPOCHS is None:  # Else MAX_STEPS is still to come.
      raise UserError(f"DECAY_FROM={self.DECAY_FROM}: its step is not below MAX_STEPS={steps}.")
    return step

  def branch(self) -> fdl.Config[Branch] | None:
    """Returns the checkpoint of another run that a new run goes on from; None: it starts anew."""
    if self.DECAY_FROM is None:
      return None
    if self.LR_SCHEDULE != "wsd":
      raise UserError(f"DECAY_FROM is only for LR_SCHEDULE=wsd, not {self.LR_SCHEDULE}.")
    return fdl.Config(Branch, path=self.DECAY_FROM)


class OptimizerKnobs(ScheduleKnobs):
  """Optimizer: the rule that makes a step of gradients, weight decay and gradient clipping."""

  OPTIMIZER: optimizers.OptimizerName = "adamw"  #: Optimizer; others can be registered.
  ADAM_BETA1: ranges.Probability = 0.9  #: Decay rate of the first moment.
  ADAM_BETA2: ranges.Probability = 0.95  #: Decay rate of the second moment.
  ADAM_EPSILON: ranges.Epsilon = 1e-8  #: Added outside the square root.
  #: Storage dtype of Adam's moments and Muon's momentum; bfloat16 uses stochastic rounding.
  ADAM_MOMENT_DTYPE: optimizers.MomentDtype = "float32"
  MUON_MOMENTUM: ranges.Probability = 0.95  #: Decay rate of Muon's momentum.
  #: Scale of Muon's updates: with "rms" they are about as large as Adam's; "width" is
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
  #: Learning rates of some weights: pattern of names, such as embedding or attention.query ->
  #: factor.
  LEARNING_RATE_SCALES: dict[ranges.Name, ranges.NonNegativeFloat] = {}
  WEIGHT_DECAY: ranges.Weight = 0.1  #: Decoupled weight decay.
  #: Weight decay in step MAX_STEPS, up to which it changes linearly. None: WEIGHT_DECAY.
  WEIGHT_DECAY_END: ranges.Weight | None = None
  #: Weight decays of some weights, as LEARNING_RATE_SCALES has learning rates.
  WEIGHT_DECAY_SCALES: dict[ranges.Name, ranges.NonNegativeFloat] = {}
  WEIGHT_DECAY_ON: Literal["everything", "matrices"] = "everything"  #: Which weights decay.
  #: Maximum global gradient norm. None: no clipping.
  CLIP_GRADIENT_NORM_TO_VALUE: ranges.PositiveFloat | None = 1.0
  #: Maximum root mean square of a weight's update, before the learning rate. None: no clipping.
  CLIP_UPDATE_RMS_TO_VALUE: ranges.PositiveFloat | None = None
  #: What is done about spikes of the loss or the gradient norm: report logs them, skip also drops
  #: their updates, clip scales their gradients down to the bound, rollback goes on from the newest
  #: checkpoint with the data after the spike. None: they are not looked for.
  ON_SPIKE: Literal["report", "skip", "clip", "rollback"] | None = None
  #: Median absolute deviations (times 1.4826) above the median at which a spike begins.
  SPIKE_DEVIATIONS: ranges.PositiveFloat = 6.0
  SPIKE_WINDOW: ranges.Positive = 64  #: Number of last steps that median and deviations are of.
  #: Half-lives, in updates, of moving averages of the weights. (): none.
  EMA_HALF_LIVES: tuple[ranges.PositiveFloat, ...] = ()
  #: Half-life of the average that is evaluated, decoded and exported. None: the first.
  EMA_EVALUATED: ranges.PositiveFloat | None = None

  def optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    """Returns the optimizer with its learning-rate schedule."""
    optimizer = self._optimizer()
    if self.EMA_HALF_LIVES:
      lives, evaluated = self.EMA_HALF_LIVES, self.EMA_EVALUATED
      optimizer = fdl.Config(optimizers.averaged, optimizer, half_lives=lives, evaluated=evaluated)
    if self.ON_SPIKE is None:
      return optimizer
    guard = fdl.Config(
      optimizers.Guard,
      action=self.ON_SPIKE,
      deviations=self.SPIKE_DEVIATIONS,
      window=self.SPIKE_WINDOW,
    )
    return fdl.Config(optimizers.guarded, optimizer, guard=guard)

  def _optimizer(self) -> fdl.Config[optimizers.Optimizer]:
    """Returns the optimizer that trains the weights."""
    if make := optimizers.OPTIMIZERS.get(self.OPTIMIZER):
      return make(self)
    shared = {
      "learning_rate": self.schedule(),
      "weight_decay": self.WEIGHT_DECAY,
      "weight_decay_schedule": self._weight_decay_schedule(),
      "decayed": getattr(optimizers, self.WEIGHT_DECAY_ON),
      "clip_norm": self.CLIP_GRADIENT_NORM_TO_VALUE,
      "clip_update": self.CLIP_UPDATE_RMS_TO_VALUE,
      "decay_scales": self.WEIGHT_DECAY_SCALES or None,
      "scales": self.LEARNING_RATE_SCALES or None,
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

  def _weight_decay_schedule(self) -> fdl.Config | None:
    first, last = self.WEIGHT_DECAY, self.WEIGHT_DECAY_END
    if last is None:
      return None
    return fdl.Config(optimizers.ramp, first=first, last=last, steps=self.max_steps())

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
