# SPDX-License-Identifier: Apache-2.0
"""Creates the state of a run from its checkpoints, or from restored weights and a seed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from paxlike.checkpoints.array_names import flatten, unflatten
from paxlike.checkpoints.branch import Branch
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checkpoints.saved_model import read_for_compute
from paxlike.checkpoints.teacher import Teacher
from paxlike.checkpoints.warm_start import PROVENANCE, Restore, began_with
from paxlike.errors import UserError
from paxlike.layers.module import Definition, Params
from paxlike.layers.stack import layout_of
from paxlike.processes import phases, verdicts
from paxlike.processes.host_collectives import broadcast
from paxlike.telemetry.run_log import RunLog
from paxlike.training import evaluated_weights, train_state
from paxlike.training.optimizers import Optimizer
from paxlike.training.train_state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSource:
  """The source of a run's state and weights.

  Attributes:
    folder: The run's folder.
    definition: Its model.
    optimizer: Its optimizer.
    devices: Its mesh.
    seed: Seed of weights that are not restored.
    restore: Source of its initial weights; None: all are initialized.
    branch: The checkpoint of another run that a new run goes on from; None: it starts anew.
    teacher: The teacher that is the reference model; None: that is the initial model.
  """

  folder: epath.Path
  definition: Definition
  optimizer: Optimizer
  devices: jax.sharding.Mesh
  seed: int
  restore: Restore | None
  branch: Branch | None = None
  teacher: Teacher | None = None

  def checkpoints(self, *, keep: int | None = None, **given: Callable[..., Any]) -> Checkpoints:
    """Returns the checkpoints of the run; `given` are arguments of `Checkpoints`."""
    return Checkpoints(self.folder / "checkpoints", keep=keep, **given)

  def state(
    self, saved: Checkpoints, run_log: RunLog
  ) -> tuple[TrainState, dict[str, Any] | None, dict[str, str | None]]:
    """Returns (training state, state of the data, files to write), of the newest checkpoint if any.

    The state of the data is None for a new run. The files (name -> text) record where its initial
    weights are from; None as text: the file is removed, since a failed start may have left it.

    Raises:
      UserError: The checkpoints, or the weights to start from, are damaged or of another model.
    """
    phases.enter("restore")
    verdicts.trained.add(self.folder)
    target = train_state.abstract(self.definition, self.optimizer, self.devices)
    target = dataclasses.replace(target, frozen={})
    layout = layout_of(self.definition.module)
    found = saved.restore_latest_valid(flatten(target), layout=layout)
    if found is not None:
      step, restored = found
      run_log.note(f"resuming from checkpoint {step}")
      state = dataclasses.replace(unflatten(target, restored.state), frozen=self._frozen())
      return state, restored.train_input, {}
    if self.branch is not None:
      restored = self.branch.load(flatten(target), layout=layout)
      run_log.note(f"going on from {self.branch.path}")
      state = dataclasses.replace(unflatten(target, restored.state), frozen=self._frozen())
      return state, restored.train_input, {PROVENANCE: self.branch.provenance()}
    given: Params = {}
    files: dict[str, str | None] = {PROVENANCE: None}
    if self.restore is not None:
      given, files[PROVENANCE], lost = self.restore.load(self.definition, self.devices)
      num_weights = len(self.definition.weights) - len(self.definition.statistics)
      run_log.note(f"restored {len(given)} of {num_weights} weights from {self.restore.path}")
      if lost is not None:
        share = self.definition.num_quantized / self.definition.num_params
        run_log.note(
          f"quantized weights ({share:.1%} of all) are off by {lost:.2%} (root mean square)"
        )
    if len(given) + len(self.definition.statistics) < len(self.definition.weights):
      run_log.note("initializing the weights")
    phases.enter("init")
    state = train_state.create(
      self.definition, self.optimizer, self.devices, seed=self.seed, given=given
    )
    return state, None, files

  @property
  def _first(self) -> epath.Path:
    """The folder that records the initial weights: until a new run has, that of its branch."""
    if self.branch is None or (self.folder / PROVENANCE).exists():
      return self.folder
    return self.branch.run

  def recorded(self, state: TrainState) -> epath.Path | None:
    """Returns the folder that records the other models of the steps so far; None: there are none.

    A start that failed may have left records of others.
    """
    return self._first if int(state.step) else None

  def reference(self, state: TrainState) -> tuple[Params, dict[str, str]]:
    """Returns (weights of the reference model in their compute dtypes, files to write).

    They are those of the teacher, or all weights as they were before the first step.

    Raises:
      UserError: The checkpoint that they are from is missing or damaged.
    """
    if self.teacher is not None:
      taught = self.teacher.load(self.devices, self.recorded(state))
      return taught.params, {self.teacher.file: taught.record}
    return self._initial(state), {}

  def _initial(self, state: TrainState) -> Params:
    if int(state.step) == 0:
      # Copies, because steps donate the originals.
      return jax.tree.map(jnp.copy, self.definition.prepare(state.weights))
    base = began_with(self._first, given=self.restore)
    given: Params = {}
    if base is not None:
      given = base.load(self.definition, self.devices, for_compute=True).params
    return self.definition.prepare(self._completed(given))

  def params(self, step: int | None) -> tuple[int, Params]:
    """Returns (step, its weights for evaluation and decoding, in their compute dtypes).

    Step None is the newest checkpoint, or, in a run without checkpoints, step 0 with the weights
    of `restore`.

    Raises:
      UserError: There is no such checkpoint, or it is of another model: it lacks weights, or holds
        some that this one does not have.
    """
    phases.enter("restore")
    saved = self.checkpoints()
    if step in (None, 0) and self.restore is not None and not broadcast(saved.steps):
      loaded = self.restore.load(self.definition, self.devices, for_compute=True, complete=True)
      return 0, self._completed(loaded.params)
    trained, _, extra = train_state.split(self.definition, self.definition.weights)
    names = [*trained, *extra]
    derived = evaluated_weights.derived(self.definition, self.optimizer, self.devices)
    step, params = read_for_compute(
      saved, step, self.definition, self.devices, names=names, derived=derived
    )
    return step, params | self._frozen()

  def _frozen(self) -> Params:
    """Returns the frozen weights, which the run's checkpoints do not contain."""
    names = self.definition.frozen
    if not names:
      return {}
    given: Params = {}
    base = began_with(self._first, given=self.restore)
    if base is not None:
      try:
        given = base.load(self.definition, self.devices, among=names).params
      except UserError as error:
        raise UserError(f"the frozen weights of {self.folder}: {error}") from error
    return self._completed(given, names)

  def _completed(self, given: Params, names: list[str] | None = None) -> Params:
    phases.enter("init")
    return train_state.init_params(
      self.definition, self.devices, seed=self.seed, given=given, names=names
    )
