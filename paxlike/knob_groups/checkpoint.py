# SPDX-License-Identifier: Apache-2.0
"""The knobs of a run's checkpoints, and the criterion of the best one."""

from typing import Literal

import fiddle as fdl

from paxlike.config import ranges
from paxlike.config.knobs import Knobs
from paxlike.training.best_checkpoint import Criterion


class CheckpointKnobs(Knobs):
  """Checkpoint: which checkpoints are saved and kept, and early stopping."""

  #: Steps between checkpoints. 0: only after the last step.
  CHECKPOINT_EVERY_N_STEPS: ranges.NonNegative = 5000
  CHECKPOINT_MAX_TO_KEEP: ranges.Positive | None = 10  #: Newest checkpoints to keep. None: all.
  #: Metric, such as validation/log_pplx (SET/METRIC), whose best checkpoint is also kept.
  BEST_CHECKPOINT_METRIC: ranges.Name | None = None
  #: Whether its lowest or highest value is best. None: min for log_pplx and bits_per_byte; max for
  #: other metrics.
  BEST_CHECKPOINT_MODE: Literal["min", "max"] | None = None
  #: Stop after this many evaluations in a row without improvement. None: never.
  EARLY_STOPPING_PATIENCE: ranges.Positive | None = None

  def best(self) -> fdl.Config[Criterion] | None:
    """Returns the criterion of the best checkpoint; None without BEST_CHECKPOINT_METRIC."""
    metric = self.BEST_CHECKPOINT_METRIC
    if metric is None:
      return None
    mode, patience = self.BEST_CHECKPOINT_MODE, self.EARLY_STOPPING_PATIENCE
    lowest = metric.endswith(("log_pplx", "bits_per_byte")) if mode is None else mode == "min"
    return fdl.Config(Criterion, metric=metric, lowest=lowest, patience=patience)
