# SPDX-License-Identifier: Apache-2.0
"""The knobs of a run and of its batch."""

from collections.abc import Mapping
from typing import TypeVar

import fiddle as fdl

from paxlike.config import ranges
from paxlike.config.knobs import UNSET, Knobs
from paxlike.telemetry.trackers.registry import TrackerName
from paxlike.training.ramp import Ramp

T = TypeVar("T")


class BatchKnobs(Knobs):
  """Batch: the sequences of an optimizer step."""

  #: Sequences per device and optimizer step; may be fractional.
  PERCORE_BATCH_SIZE: ranges.Batch = UNSET
  #: Number of microbatches that the batch is split into.
  GRADIENT_ACCUMULATION_STEPS: ranges.Size = 1
  #: PERCORE_BATCH_SIZE of the first steps: step -> size before it, such as {500: 1, 1000: 2}.
  PERCORE_BATCH_SIZE_RAMP: dict[ranges.Positive, ranges.Batch] = {}
  #: Sequence length of the first steps: step -> length before it. Longer sequences are split.
  MAX_SEQ_LEN_RAMP: dict[ranges.Positive, ranges.Size] = {}

  def ramps(self) -> tuple[fdl.Config[Ramp], ...]:
    """Returns what the first steps have instead of the batch size and the sequence length."""
    sizes, lengths = self.PERCORE_BATCH_SIZE_RAMP, self.MAX_SEQ_LEN_RAMP
    return tuple(
      fdl.Config(
        Ramp,
        end=end,
        percore_batch_size=_before(end, sizes),
        seq_len=_before(end, lengths),
      )
      for end in sorted({*sizes, *lengths})
    )


class RunKnobs(Knobs):
  """Run: its length, seed, log and evaluations, and when it aborts."""

  MAX_STEPS: ranges.NonNegative = UNSET  #: Optimizer steps.
  #: Passes over the training data, instead of MAX_STEPS. None: MAX_STEPS applies.
  NUM_EPOCHS: ranges.PositiveFloat | None = None
  RANDOM_SEED: ranges.NonNegative = 1234  #: Seed of weights, dropout and data order.
  SUMMARY_INTERVAL_STEPS: ranges.Positive = 100  #: Steps between log lines.
  #: Steps between records of each layer's norms, activations, logits and expert loads. 0: none.
  LOG_LAYERS_EVERY: ranges.NonNegative = 0
  #: Number of first steps of each start that the speed printed at the end leaves out.
  SPEED_SKIP_STEPS: ranges.NonNegative = 5
  #: Number of tokens; the end of the run prints how long training on them takes at its speed.
  TARGET_TOKENS: ranges.PositiveFloat | None = None
  #: Steps between evaluations. 0: only after the last step.
  EVAL_INTERVAL_STEPS: ranges.NonNegative = 100
  #: Abort after this many steps in a row whose loss or gradient is not finite, or rollbacks to the
  #: same checkpoint.
  MAX_SKIPPED_STEPS_IN_A_ROW: ranges.Positive = 10
  #: Steps between comparisons of all copies of the state, which find faulty devices. 0: none.
  CHECK_REPLICAS_EVERY: ranges.NonNegative = 0
  #: Every how many steps a step is computed twice and the results compared, which finds faulty
  #: devices where the state has no copies. It needs the memory of two states. 0: never.
  REPEAT_STEP_EVERY: ranges.NonNegative = 0
  #: Seconds without progress after which the job exits with status 75, so that a launcher restarts
  #: it. None: derived from durations so far, at least 60, no limit while compiling. 0: no limit.
  STALL_TIMEOUT: ranges.Seconds | None = None
  #: Seconds between dumps of all threads' stacks into the run's folder. None: only after a stall
  #: and on SIGUSR1.
  STACK_TRACE_INTERVAL: ranges.Interval | None = None
  SAMPLE_PROMPT: str | None = None  #: Prompt that the trained model continues. None: no sample.
  #: Where the records go besides metrics.jsonl: [tensorboard,wandb], say; others can be registered.
  TRACKERS: tuple[TrackerName, ...] = ("tensorboard",)
  #: Project of the run in trackers. None: WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, or "paxlike".
  TRACKER_PROJECT: ranges.Name | None = None

  def max_steps(self) -> int:
    """Returns MAX_STEPS; with NUM_EPOCHS, 1 until `cli.epochs` has set MAX_STEPS."""
    if self.NUM_EPOCHS is None:
      return self.MAX_STEPS
    steps = self.values()["MAX_STEPS"].value
    return 1 if steps is UNSET else steps


def _before(step: int, ends: Mapping[int, T]) -> T | None:
  """Returns the value of the steps before `step`, given those before each of `ends`; None: none."""
  return next((ends[end] for end in sorted(ends) if step <= end), None)
