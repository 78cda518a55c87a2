# SPDX-License-Identifier: Apache-2.0
"""Where the state of a run comes from: its checkpoints, the weights it starts from, its seed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from paxlike.checkpoints import layout_conversion
from paxlike.checkpoints.checkpoint import Checkpoints, agreed, flatten, unflatten
from paxlike.checkpoints.warm_start import PROVENANCE, Restore, began_with, read_found, read_params
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params
from paxlike.layers.stack import layout_of
from paxlike.processes import ending, progress
from paxlike.telemetry.run_log import Journal
from paxlike.training import train_state
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
  """Makes the state of the run in `folder`.

  Attributes:
    folder: The run's.
    definition: Its model.
    devices: Its mesh.
    seed: Of the weights that nobody gives.
    restore: The weights that it starts from; None: all are drawn.
  """

  folder: epath.Path
  definition: Definition
  devices: jax.sharding.Mesh
  seed: int
  restore: Restore | None

  def checkpoints(self, *, keep: int | None = None, **given: Callable[..., Any]) -> Checkpoints:
    """Returns those of the run; see `Checkpoints` for what else may be given."""
    return Checkpoints(self.folder / "checkpoints", keep=keep, **given)

  def state(
    self, saved: Checkpoints, optimizer: Optimizer, journal: Journal
  ) -> tuple[TrainState, dict[str, Any] | None, dict[str, str | None]]:
    """Returns the state to go on from, that of the data, and files that tell where it is from.

    A file that is None is to be removed: a start that failed may have left it.

    Raises:
      UserError: The checkpoints, or the weights to start from, are damaged or of another model.
    """
    progress.enter("restore")
    ending.trained.add(self.folder)
    target = train_state.abstract(self.definition, optimizer, self.devices)
    target = dataclasses.replace(target, frozen={})
    layout = layout_of(self.definition.module)
    found = saved.restore_latest_valid(flatten(target), layout=layout)
    if found is not None:
      step, restored = found
      journal.note(f"resuming from checkpoint {step}")
      state = dataclasses.replace(unflatten(target, restored.state), frozen=self._frozen())
      return state, restored.train_input, {}
    given: Params = {}
    files: dict[str, str | None] = {PROVENANCE: None}
    if self.restore is not None:
      given, files[PROVENANCE], lost = self.restore.load(self.definition, self.devices)
      num_weights = len(self.definition.weights) - len(self.definition.statistics)
      journal.note(f"{len(given)} of {num_weights} weights: {self.restore.path}")
      if lost is not None:
        share = self.definition.num_quantized / self.definition.num_params
        journal.note(
          f"quantized weights ({share:.1%} of all) are off by {lost:.2%} (root mean square)"
        )
    if len(given) + len(self.definition.statistics) < len(self.definition.weights):
      journal.note("initialising the weights")
    progress.enter("init")
    state = train_state.create(
      self.definition, optimizer, self.devices, seed=self.seed, given=given
    )
    return state, None, files

  def reference(self, state: TrainState) -> Params:
    """Returns all weights as they were before the first step, in the dtypes of the layers.

    Raises:
      UserError: What the run began with is gone or damaged.
    """
    if int(state.step) == 0:
      # Arrays of their own, since steps give the others away.
      return jax.tree.map(jnp.copy, self.definition.prepare(state.weights))
    base = began_with(self.folder, given=self.restore)
    given: Params = {}
    if base is not None:
      given = base.load(self.definition, self.devices, for_compute=True).params
    return self.definition.prepare(self._completed(given))

  def params(self, step: int | None) -> tuple[int, Params]:
    """Returns a step and its weights, in the dtypes of the layers.

    Step None is the newest checkpoint; in a run without any, 0, before the first update, if there
    are weights to start from.

    Raises:
      UserError: There is no such checkpoint, or it is of another model: it lacks weights, or holds
        some that this one does not have.
    """
    progress.enter("restore")
    saved = self.checkpoints()
    if step in (None, 0) and self.restore is not None and not agreed(saved.steps):
      taken = self.restore.load(self.definition, self.devices, for_compute=True, complete=True)
      return 0, self._completed(taken.params)
    changing, _, noticed = train_state.split(self.definition, self.definition.weights)
    names = [*changing, *noticed]
    step, (params, _) = read_found(
      saved,
      step,
      lambda step: read_params(
        saved,
        step,
        self.definition,
        self.devices,
        names=names,
        for_compute=True,
        unread=layout_conversion.all_but_weights,
      ),
    )
    return step, params | self._frozen()

  def _frozen(self) -> Params:
    """Returns the weights that no step changes and no checkpoint of the run has."""
    names = self.definition.frozen
    if not names:
      return {}
    given: Params = {}
    base = began_with(self.folder, given=self.restore)
    if base is not None:
      try:
        given = base.load(self.definition, self.devices, among=names).params
      except UserError as error:
        raise UserError(f"the frozen weights of {self.folder}: {error}") from error
    return self._completed(given, names)

  def _completed(self, given: Params, names: list[str] | None = None) -> Params:
    progress.enter("init")
    return train_state.init_params(
      self.definition, self.devices, seed=self.seed, given=given, names=names
    )
