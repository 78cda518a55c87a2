# SPDX-License-Identifier: Apache-2.0
"""The knobs of a run and of its batch."""

from paxlike.config import ranges
from paxlike.config.knobs import UNSET, Knobs
from paxlike.telemetry.trackers.registry import TrackerName


class BatchKnobs(Knobs):
  """Batch: the sequences of an optimizer step."""

  #: Sequences per device and optimizer step; may be fractional.
  PERCORE_BATCH_SIZE: ranges.Batch = UNSET
  #: Number of microbatches that the batch is split into.
  GRADIENT_ACCUMULATION_STEPS: ranges.Size = 1


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
  #: Abort after this many steps in a row whose loss or gradient is not finite.
  MAX_SKIPPED_STEPS_IN_A_ROW: ranges.Positive = 10
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
