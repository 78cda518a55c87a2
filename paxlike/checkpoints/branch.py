# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of another run from which a run goes on, with its optimizer state and data."""

import dataclasses
from collections.abc import Mapping

import jax
from etils import epath

from paxlike import file_io
from paxlike.checkpoints.checkpoint import Checkpoint, Restored
from paxlike.checkpoints.orbax_hooks import step_of
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
  step = step_of(epath.Path(path).name)
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
    return self._checkpoint.restore(target, layout=layout)

  def provenance(self) -> str | None:
    """Returns the record of the other run's initial weights, which this run then has, too."""
    file = self._folder.parent.parent / PROVENANCE
    return file_io.read_bytes(file).decode() if file.exists() else None

  @property
  def _folder(self) -> epath.Path:
    return file_io.absolute(self.path)

  @property
  def _checkpoint(self) -> Checkpoint:
    if not self._folder.exists():
      raise UserError(f"DECAY_FROM={self.path}: there is no such checkpoint.")
    return Checkpoint(self._folder)
