# SPDX-License-Identifier: Apache-2.0
"""Ramps: in the first steps of a run, the batch is smaller, or its sequences are shorter.

A large batch pays only late in training (McCandlish et al., 2018, arXiv:1812.06162); short
sequences first are cheaper and more stable (Li et al., 2022, arXiv:2108.06084).
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.data.sliced import Sliced
from paxlike.errors import UserError
from paxlike.training.execution import Execution
from paxlike.training.objectives import NextToken

if TYPE_CHECKING:
  from paxlike.training.trainer import Trainer


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ramp:
  """Batch size and sequence length from the end of the previous ramp to step `end`.

  Attributes:
    end: The number of steps that are complete when it ends.
    percore_batch_size: Full-length sequences per device and step; None: the run's.
    seq_len: Sequence length. Each sequence is split into as many of this length as it has, so that
      a batch keeps its number of tokens. None: that of the data.
  """

  end: ranges.Positive
  percore_batch_size: ranges.Batch | None = None
  seq_len: ranges.Size | None = None


class Stage(NamedTuple):
  """Consecutive steps with the same batch size and sequence length.

  Attributes:
    end: The number of complete steps when it ends.
    trainer: The run's trainer with that batch size and sequence length.
    sequences: Full-length sequences per step.
  """

  end: int
  trainer: "Trainer"
  sequences: int


def stages(trainer: "Trainer") -> list[Stage]:
  """Returns the stages of a run in order; the last one is the trainer itself.

  Raises:
    UserError: A sequence length does not divide that of the data, or the objective needs whole
      examples.
  """
  ends = [ramp.end for ramp in trainer.ramps]
  if ends != sorted(set(ends)):
    raise UserError(f"ramps: their ends {ends} must ascend.")
  found = []
  for ramp in trainer.ramps:
    slices, data = 1, trainer.train_data
    assert data is not None
    if ramp.seq_len is not None:
      slices = _slices(trainer, ramp.seq_len)
      data = Sliced(data, slices=slices) if slices > 1 else data
    percore = ramp.percore_batch_size or trainer.percore_batch_size
    # A compiled step and a PGLE profile apply to the last stage only.
    execution = Execution(compiler_options=trainer.execution.compiler_options)
    variant = dataclasses.replace(
      trainer, percore_batch_size=percore * slices, train_data=data, execution=execution, ramps=()
    )
    with naming(ramp.end):
      whole = dataclasses.replace(trainer, percore_batch_size=percore, ramps=()).batch_size
    found.append(Stage(ramp.end, variant, whole))
  return [*found, Stage(ranges.INT32, trainer, trainer.batch_size)]


@contextlib.contextmanager
def naming(end: int) -> Iterator[None]:
  """Context in which a UserError says that it is about the steps before `end`."""
  try:
    yield
  except UserError as error:
    raise UserError(f"before step {end} (PERCORE_BATCH_SIZE_RAMP): {error}") from None


def text(stages: list[Stage]) -> str:
  """Returns a line on each stage but the last, for the header of a run."""
  lines = []
  for stage in stages[:-1]:
    size, length = stage.trainer.batch_size, stage.trainer.data.seq_len
    lines.append(f"ramp:       {size} sequences x {length} tokens before step {stage.end:,}\n")
  return "".join(lines)


def num_sequences(stages: list[Stage], num_steps: int) -> int:
  """Returns the full-length sequences of the first `num_steps` steps of a run."""
  total, first = 0, 0
  for stage in stages:
    end = min(stage.end, num_steps)
    total += max(end - first, 0) * stage.sequences
    first = max(end, first)
  return total


def num_steps(stages: list[Stage], sequences: float) -> int:
  """Returns the least number of steps that see at least so many full-length sequences."""
  first, left = 0, sequences
  for stage in stages:
    needed = math.ceil(left / stage.sequences)
    if first + needed <= stage.end:
      return first + needed
    left -= (stage.end - first) * stage.sequences
    first = stage.end
  return first


def _slices(trainer: "Trainer", length: int) -> int:
  """Returns the number of sequences of `length` tokens in a full one."""
  full = trainer.data.seq_len
  if full % length:
    raise UserError(
      f"MAX_SEQ_LEN_RAMP: {length} tokens do not divide MAX_SEQ_LEN={full}: choose a divisor."
    )
  if type(trainer.objective) is not NextToken:
    raise UserError(
      f"MAX_SEQ_LEN_RAMP splits examples, which the objective {type(trainer.objective).__name__}"
      " needs whole: leave it out."
    )
  return full // length
