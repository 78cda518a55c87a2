# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another run from which a run goes on, with its optimizer state and data."""

import dataclasses
from collections.abc import Mapping

import jax
from etils import epath

from paxlike import file_io
from paxlike.checkpoints.checkpoint import Restored
from paxlike.checkpoints.orbax_hooks import step_of
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.warm_start import PROVENANCE
from paxlike.config import ranges
from paxlike.config.configurable import configurable
from paxlike.errors import UserError
from paxlike.layers.stack_layout import Layout


def step_in(path: str) -> int:
  """Returns the step in the path of a checkpoint.

  Raises:
    UserError: It is not the path of a checkpoint.
  """
  step = step_of(path.rstrip("/").rpartition("/")[2])
  if step is None:
    raise UserError(
      f"DECAY_FROM={path} is not a checkpoint, such as RUN/checkpoints/checkpoint_00001000."
    )
  return step


@configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Branch:
  """The checkpoint of another run from which a new run goes on.

  Attributes:
    path: The folder of the checkpoint.
  """

  path: ranges.Path

  def load(self, target: Mapping[str, jax.ShapeDtypeStruct], *, layout: Layout) -> Restored:
    """Returns the contents of the checkpoint.

    Raises:
      UserError: It is missing, damaged or of another experiment.
    """
    saved = Checkpoints(self._folder.parent, keep=None)
    try:
      step = saved.find(step_in(self.path))
    except UserError as error:
      raise UserError(f"DECAY_FROM={self.path}: {error}") from None
    return saved.at(step).restore(target, layout=layout)

  @property
  def run(self) -> epath.Path:
    """The folder of the other run, whose initial weights are this run's, too."""
    return self._folder.parent.parent

  def provenance(self) -> str | None:
    """Returns the record of those initial weights; None: there is none.

    Raises:
      UserError: It cannot be read.
    """
    file = self.run / PROVENANCE
    try:
      return file_io.read_bytes(file).decode() if file.exists() else None
    except (OSError, ValueError) as error:
      raise UserError(f"{file} cannot be read: {file_io.reason(error)}.") from error

  @property
  def _folder(self) -> epath.Path:
    return file_io.absolute(self.path)
