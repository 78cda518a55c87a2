# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: saved asynchronously and atomically, and the newest undamaged one."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import jax
from etils import epath
from jax.experimental import multihost_utils

from paxlike import file_io, run_folder
from paxlike.checkpoints import orbax_hooks
from paxlike.checkpoints.checkpoint import Checkpoint, Restored, metadata_of
from paxlike.checkpoints.checksums import Damaged
from paxlike.errors import RunError, UserError, one_line
from paxlike.layers.stack_layout import Layout
from paxlike.processes.host_collectives import all_processes, broadcast

_SHORT_TURN = 3e-4  # Seconds.


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
  """Context in which Python's threads take turns of at most 0.3 ms instead of 5 ms.

  Orbax writes in a thread as soon as it has copied the arrays. Whenever the caller has then waited
  for a file or another thread, it must wait for that thread's turn to end before it goes on.
  """
  usual = sys.getswitchinterval()
  if usual <= _SHORT_TURN:
    yield
    return
  sys.setswitchinterval(_SHORT_TURN)
  try:
    yield
  finally:
    sys.setswitchinterval(usual)


class Checkpoints:
  """The checkpoints of one run."""

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    keep: int | None,
    preserved: Callable[[], int | None] = lambda: None,
    check_owner: Callable[[], None] = lambda: None,
    on_commit: Callable[[int, epath.Path], None] = lambda step, path: None,
  ):
    """Reads nothing yet.

    Args:
      directory: The folder of checkpoints.
      keep: Number of newest checkpoints to keep; a save that was verified removes the others.
        None: all are kept.
      preserved: Returns one more step to keep, such as that of the best checkpoint; None: no more.
      check_owner: Raises if this process may no longer write.
      on_commit: Called with each committed checkpoint, in a thread of process 0.

    Raises:
      UserError: `keep` is below 1.
    """
    orbax_hooks.check_keep(keep)
    import orbax.checkpoint as ocp  # Takes most of a second, and not every mode needs it.

    self._ocp, self._check_owner = ocp, check_owner
    self._directory = file_io.absolute(directory)  # Orbax accepts no relative path.
    self._keep, self._preserved, self._on_commit = keep, preserved, on_commit
    self._damaged: set[int] = set()  # Steps that `restore_latest_valid` has skipped.
    self._not_kept: list[epath.Path] = []  # Removed after the current save is committed.
    self._at: dict[int, Checkpoint] = {}
    self._manager: Any = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type | None, *unused: object):
    try:
      self._close()
    except orbax_hooks.failures() as error:
      if kind is None:
        raise
      # The exception in progress must not be hidden.
      if isinstance(error, UserError | RunError) and not issubclass(kind, orbax_hooks.Unwritable):
        print(f"paxlike: {one_line(error)}", file=sys.stderr)

  def _close(self):
    """Closes Orbax's manager, if there is one; the next save opens another."""
    manager, self._manager = self._manager, None
    if manager is not None:
      with orbax_hooks.writing(self._directory):
        manager.close()

  def _open(self, step: int) -> Any:
    """Creates and returns Orbax's manager, which removes unfinished saves when it is created.

    Therefore the first save creates it; reading does not. Damaged checkpoints from `step` on are
    renamed, since Orbax saves no step before the newest.

    Raises:
      UserError: A checkpoint from `step` on is undamaged.
    """
    newer = [other for other in self.steps() if other >= step]
    if whole := [str(other) for other in newer if other not in self._damaged]:
      raise UserError(
        f"{self._directory} has checkpoint {', '.join(whole)}, which this run did not restore: it"
        f" cannot save checkpoint {step}."
      )
    if jax.process_index() == 0:
      for path in map(self.path, newer):
        path.rename(self._directory / f"damaged_{path.name}_{time.time_ns()}")
    self._damaged.difference_update(newer)
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
    options = orbax_hooks.options(
      self._directory,
      before=self._check_owner,
      after=self._committed,
    )
    registry = orbax_hooks.handlers(jax.process_index())
    return self._ocp.CheckpointManager(self._directory, options=options, handler_registry=registry)

  def _committed(self, path: epath.Path):
    orbax_hooks.remove_after(path, self._not_kept)
    self._on_commit(orbax_hooks.step_of(path.name) or 0, path)

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, oldest first."""
    complete = self._ocp.utils.is_checkpoint_finalized
    with run_folder.reading(self._directory):
      paths = file_io.beginning_with(self._directory, "checkpoint_")
      found = ((orbax_hooks.step_of(p.name), p) for p in paths)
      return sorted(step for step, p in found if step is not None and complete(p))

  def latest(self) -> int | None:
    """Returns the newest step, None if there is none."""
    steps = self.steps()
    return steps[-1] if steps else None

  def find(self, step: int | None) -> int:
    """Returns `step`, or the newest for None.

    Raises:
      UserError: There is no such checkpoint.
    """
    steps = self.steps()
    if step in steps or (step is None and steps):
      return steps[-1] if step is None else step
    wanted = "checkpoint" if step is None else f"checkpoint {step}"
    known = ", ".join(map(str, steps)) or "none"
    raise UserError(f"no {wanted} in {self._directory}; available: {known}.")

  def path(self, step: int) -> epath.Path:
    """Returns the folder of a checkpoint."""
    return self._directory / f"checkpoint_{step:08d}"

  def at(self, step: int) -> Checkpoint:
    """Returns the checkpoint of `step`, which must exist."""
    if step not in self._at:
      self._at[step] = Checkpoint(self.path(step))
    return self._at[step]

  def save(
    self,
    step: int,
    state: Mapping[str, jax.Array],
    *,
    layout: Layout,
    train_input: dict[str, Any],
  ):
    """Copies the state and returns; it is written in the background. Arrays may then be donated.

    Raises:
      UserError: This save, or the previous one, failed; older checkpoints are intact.
    """
    save = self._ocp.args
    metadata = metadata_of(state, layout)
    self._check_owner()
    with orbax_hooks.writing(self._directory), _short_turns():
      self._manager = self._manager or self._open(step)
      self._manager.wait_until_finished()
      older = [other for other in self.steps() if other < step]
      not_kept = orbax_hooks.not_kept(older, keep=self._keep, preserved=self._preserved())
      self._not_kept = [self.path(other) for other in not_kept]
      is_saved = self._manager.save(
        step,
        args=save.Composite(
          state=save.StandardSave(dict(state)),
          metadata=save.JsonSave(metadata),
          train_input=save.JsonSave(train_input),
        ),
      )
    assert is_saved, f"checkpoint {step} is not newer than {self.latest()}"

  def wait(self):
    """Waits until all saves are committed.

    Raises:
      UserError: One failed.
    """
    if self._manager is None:
      return
    with orbax_hooks.writing(self._directory):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def restore_latest_valid(
    self, target: Mapping[str, jax.ShapeDtypeStruct], *, layout: Layout
  ) -> tuple[int, Restored] | None:
    """Returns (step, contents) of the newest undamaged checkpoint; None without checkpoints.

    Raises:
      UserError: All checkpoints are damaged, or one is of another experiment.
    """
    steps = broadcast(self.steps)
    for step in reversed(steps):
      restored = None
      reason = f"{self.path(step)} is damaged (another process cannot read its shards)."
      try:
        restored = self.at(step).restore(target, layout=layout)
      except Damaged as error:
        reason = str(error)
      if all_processes(restored is not None) and restored is not None:
        orbax_hooks.check_older(self.path(other) for other in steps if other < step)
        return step, restored
      del restored  # Memory may not suffice for two.
      self._damaged.add(step)
      self._at.pop(step, None)
      self._close()  # The next manager moves it aside.
      print(f"paxlike: {one_line(reason)}", file=sys.stderr)
    if steps:
      raise UserError(
        f"no checkpoint in {self._directory} can be read; move the folder away to start anew."
      )
    return None
