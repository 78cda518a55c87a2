# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved asynchronously and atomically, restored onto any mesh and layout.

A training state is saved as a flat dict of arrays under dotted names. `checkpoint_00000100` is the
state after 100 updates: `state`, `metadata` (names, shapes, dtypes and layout), `train_input` (the
position in the data), and checksums of all files.
"""

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from paxlike import file_io, run_folder
from paxlike.checkpoints import checksums, committing, layout_conversion, manifest
from paxlike.checkpoints.checksums import Checksums, Damaged
from paxlike.errors import RunError, UserError, one_line
from paxlike.layers.stack_layout import Layout
from paxlike.processes import ending

Flat = dict[str, Any]


class Restored(NamedTuple):
  """The contents of a checkpoint."""

  state: Flat
  metadata: dict[str, Any]
  train_input: dict[str, Any]


def flatten(tree: Any) -> Flat:
  """Returns the leaves of a pytree under dotted names, such as "params.embedding.table"."""
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(like: Any, flat: Mapping[str, Any]) -> Any:
  """Returns a pytree of the structure of `like` with the leaves of `flat`; inverts `flatten`."""
  return jax.tree_util.tree_map_with_path(lambda path, _: flat[_name(path)], like)


def _name(path: tuple[Any, ...]) -> str:
  parts = (getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path)
  return ".".join(map(str, parts))


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
      keep: Number of newest checkpoints to keep; others go after a verified save. None: all.
      preserved: Returns another step to keep.
      check_owner: Raises if this process may no longer write.
      on_commit: Called with each committed checkpoint, in a thread of process 0.

    Raises:
      UserError: `keep` is below 1.
    """
    committing.check_keep(keep)
    import orbax.checkpoint as ocp  # Takes most of a second, and not every mode needs it.

    self._ocp, self._check_owner = ocp, check_owner
    self._directory = file_io.absolute(directory)  # Orbax accepts no relative path.
    self._keep, self._preserved, self._on_commit = keep, preserved, on_commit
    self._damaged: set[int] = set()  # Steps that `restore_latest_valid` has skipped.
    self._not_kept: list[epath.Path] = []  # Removed after the current save is committed.
    self._opened: dict[int, tuple[dict[str, Any], Checksums | None]] = {}
    self._manager: Any = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type | None, *unused: object):
    if self._manager is None:
      return
    try:
      with committing.writing(self._directory):
        self._manager.close()
    except committing.failures() as error:
      if kind is None:
        raise
      # The exception in progress must not be hidden.
      if isinstance(error, UserError | RunError) and not issubclass(kind, committing.Unwritable):
        print(f"paxlike: {one_line(error)}", file=sys.stderr)

  def _open(self, step: int) -> Any:
    """Returns Orbax's manager, made by the first save, because it removes unfinished saves.

    Damaged checkpoints from `step` on are renamed, since Orbax saves no step before the newest.

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
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
    options = committing.options(
      self._directory,
      before=self._check_owner,
      after=self._committed,
    )
    registry = committing.handlers(jax.process_index())
    return self._ocp.CheckpointManager(self._directory, options=options, handler_registry=registry)

  def _committed(self, path: epath.Path):
    committing.remove_after(path, self._not_kept)
    self._on_commit(committing.step_of(path.name) or 0, path)

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, oldest first."""
    complete = self._ocp.utils.is_checkpoint_finalized
    with run_folder.reading(self._directory):
      paths = file_io.beginning_with(self._directory, "checkpoint_")
      found = ((committing.step_of(p.name), p) for p in paths)
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
    with committing.writing(self._directory):
      self._manager = self._manager or self._open(step)
      self._manager.wait_until_finished()
      older = [other for other in self.steps() if other < step]
      not_kept = committing.not_kept(older, keep=self._keep, preserved=self._preserved())
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
    with committing.writing(self._directory):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def restore(
    self,
    step: int,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    unread: layout_conversion.Unread | None = None,
  ) -> Restored:
    """Returns checkpoint `step` with the shardings of `target`, converted to `layout`.

    Non-trainable state that the checkpoint lacks is zeros. Orbax's handlers are called directly:
    its checkpointers have barriers, where a process that cannot read its shards would be missing.

    Args:
      step: The checkpoint's step.
      target: Name -> shape, dtype and sharding of each array.
      layout: The layout of `target`.
      unread: Which arrays of the checkpoint `target` may lack; if given, float dtypes may differ.
        None: none.

    Raises:
      UserError: Names, shapes or dtypes differ (another experiment), or it is damaged.
    """
    ocp = self._ocp
    with self._reading(step):
      _, sums = self._described(step)
      if sums is None and jax.process_index() == 0:
        print(f"paxlike: {self.path(step)} has no checksums: not verified.", file=sys.stderr)
      train_input = self._read_json(step, "train_input", sums)
      for name in ("epoch", "position"):
        if not layout_conversion.is_size(train_input.get(name, 0)):
          raise ValueError(f"train_input/metadata: {name} is {train_input[name]}")
    metadata, saved_layout, lacking = self.check(step, target, layout=layout, unread=unread)
    zeros = {n: target[n] for n in lacking}
    target = {n: leaf for n, leaf in target.items() if n not in lacking}
    source = layout_conversion.in_layout(target, layout, saved_layout)
    arguments = ocp.args.PyTreeRestore(
      source,
      restore_args=ocp.checkpoint_utils.construct_restore_args(source),
      partial_restore=True,  # `check` has already refused surplus arrays.
    )
    with self._reading(step), _verifying(sums, source):
      state = self._arrays(step, arguments)
    state = layout_conversion.converted(state, saved_layout, target, layout)
    state |= {n: jnp.zeros(x.shape, x.dtype, device=x.sharding) for n, x in zeros.items()}
    return Restored(state, metadata, train_input)

  def check(
    self,
    step: int,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    unread: layout_conversion.Unread | None = None,
  ) -> tuple[dict[str, Any], Layout, set[str]]:
    """Returns metadata, layout, and the lacking non-trainable state; reads no array.

    Raises:
      UserError: `restore` would fail with this target.
    """
    with self._reading(step):
      metadata, _ = self._described(step)
      saved_layout = layout_conversion.layout_in(metadata)
      tensors = {
        name: layout_conversion.tensor_of(*listed) for name, listed in metadata["tensors"].items()
      }
    if unread is None and all(name.startswith("params.") for name in tensors):
      raise UserError(
        f"{self.path(step)} has weights but no training state: start a run in a new folder, with"
        f" --fdl.CHECKPOINT_RESTORE_PATH={self._directory.parent}"
      )
    if differences := layout_conversion.differences(
      tensors, saved_layout, target, layout, unread=unread
    ):
      shown = "; ".join(differences[:5])
      more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
      raise UserError(f"{self.path(step)} is of another experiment: {shown}{more}.")
    return metadata, saved_layout, layout_conversion.lacking(tensors, saved_layout, target, layout)

  def restore_latest_valid(
    self, target: Mapping[str, jax.ShapeDtypeStruct], *, layout: Layout
  ) -> tuple[int, Restored] | None:
    """Returns (step, contents) of the newest undamaged checkpoint; None without checkpoints.

    Raises:
      UserError: All checkpoints are damaged, or one is of another experiment.
    """
    steps = agreed(self.steps)
    for step in reversed(steps):
      restored = None
      reason = f"{self.path(step)} is damaged (another process cannot read its shards)."
      try:
        restored = self.restore(step, target, layout=layout)
      except Damaged as error:
        reason = str(error)
      if everywhere(restored is not None) and restored is not None:
        committing.check_older(self.path(other) for other in steps if other < step)
        return step, restored
      del restored  # Memory may not suffice for two.
      self._damaged.add(step)
      print(f"paxlike: {one_line(reason)}", file=sys.stderr)
    if steps:
      raise UserError(
        f"no checkpoint in {self._directory} can be read; move the folder away to start anew."
      )
    return None

  def layout(self, step: int) -> Layout:
    """Returns the layout in which a checkpoint's weights are stored.

    Raises:
      UserError: It is damaged.
    """
    with self._reading(step):
      return layout_conversion.layout_in(self._described(step)[0])

  def has_training_state(self, step: int) -> bool:
    """Returns whether a checkpoint has more than weights: a converted model has not.

    Raises:
      UserError: It is damaged.
    """
    with self._reading(step):
      return any(name.startswith("opt_state.") for name in self._described(step)[0]["tensors"])

  def read(self, step: int, name: str) -> np.ndarray:
    """Returns one array by its stored name.

    Raises:
      UserError: It is missing or damaged.
    """
    how = {name: self._ocp.RestoreArgs(restore_type=np.ndarray)}
    args = self._ocp.args.PyTreeRestore({name: 0}, restore_args=how, partial_restore=True)
    with self._reading(step):
      metadata, sums = self._described(step)
      if name not in metadata["tensors"]:
        raise UserError(f"{self.path(step)} has no array {name}.")
      if sums is not None:
        sums.verify(arrays=[name])
      return self._arrays(step, args)[name]

  def verify(self, step: int) -> int | None:
    """Verifies a checkpoint and returns its number of bytes; None if it has no checksums.

    Raises:
      UserError: It is damaged.
    """
    with self._reading(step):
      _, sums = self._described(step)
      if sums is None:
        return None
      sums.verify(arrays=None)
      return sums.num_bytes

  def identity(self, step: int) -> str | None:
    """Returns a checksum of a checkpoint's arrays, equal for copies; None if unknown.

    Raises:
      UserError: It is damaged.
    """
    with self._reading(step):
      _, sums = self._described(step)
      return None if sums is None else sums.identity

  @contextlib.contextmanager
  def _reading(self, step: int) -> Iterator[None]:
    """Context that converts the errors of reading a damaged checkpoint to `Damaged`."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      # For a truncated data file, Orbax raises Exception itself.
      known = (*committing.failures(), KeyError, TypeError)  # The last two from JSON.
      is_foreseen = type(error) is Exception or isinstance(error, known)
      if not is_foreseen or ending.is_of_jax(error):
        raise
      reason = file_io.reason(error.__cause__ or error)
      raise checksums.damaged(self.path(step), reason) from error

  def _arrays(self, step: int, arguments: Any) -> Flat:
    """Returns arrays of a checkpoint."""
    with contextlib.closing(self._ocp.PyTreeCheckpointHandler()) as handler:
      found = handler.restore(self.path(step) / "state", args=arguments)
    for name, array in found.items():
      if not isinstance(array, jax.Array | np.ndarray):  # Orbax returns the request if missing.
        raise ValueError(f"array {name} is missing")
    return found

  def _described(self, step: int) -> tuple[dict[str, Any], Checksums | None]:
    """Returns a checkpoint's metadata and checksums; the first call verifies all but the arrays."""
    if step not in self._opened:
      sums = checksums.read(self.path(step))
      metadata = self._read_json(step, "metadata", sums)
      if not isinstance(metadata.get("tensors"), dict):
        raise ValueError("metadata/metadata lists no tensors")
      if metadata.get("checksums") and sums is None:
        raise checksums.damaged(self.path(step), f"{manifest.FILE} is missing")
      if sums is not None:
        sums = sums.among(metadata["tensors"])
        sums.verify(arrays=())
      self._opened[step] = metadata, sums
    return self._opened[step]

  def _read_json(self, step: int, item: str, sums: Checksums | None) -> dict[str, Any]:
    data = file_io.read_bytes(self.path(step) / item / "metadata")
    if sums is not None:
      sums.verify_file(f"{item}/metadata", data)
    found = json.loads(data)
    if not isinstance(found, dict):
      raise ValueError(f"{item}/metadata is not a JSON object")
    return found


def _verifying(
  sums: Checksums | None, arrays: Collection[str]
) -> contextlib.AbstractContextManager[None]:
  """Returns a context during which arrays are verified; processes share the work."""
  if sums is None:
    return contextlib.nullcontext()
  return sums.verifying(arrays=arrays, index=jax.process_index(), count=jax.process_count())


def metadata_of(state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
  """Returns a checkpoint's metadata for arrays, or for their shapes and dtypes."""
  import orbax.checkpoint as ocp

  return {
    "layout": dataclasses.asdict(layout),
    "tensors": {name: [list(x.shape), str(x.dtype)] for name, x in state.items()},
    "versions": {"jax": jax.__version__, "orbax": ocp.__version__},
    "checksums": True,
  }


def everywhere(here: bool) -> bool:
  """Returns whether `here` is true in all processes; each must call this."""
  if jax.process_count() == 1:
    return here
  return bool(np.all(multihost_utils.process_allgather(np.array(here))))


def agreed(find: Callable[[], Sequence[int]]) -> list[int]:
  """Broadcasts the steps that process 0 finds; each process must call this.

  Processes might find different steps, since a run may save and delete checkpoints meanwhile.

  Raises:
    UserError: `find` raised it in process 0; raised in all processes.
  """
  if jax.process_count() == 1:
    return list(find())
  from paxlike.processes import multiprocess

  found, refusal = [], None
  try:
    found = find() if jax.process_index() == 0 else []
  except UserError as error:
    refusal = error
  multiprocess.agree(refusal)
  (size,) = multihost_utils.broadcast_one_to_all(np.array([len(found)], np.int32))
  if not size:
    return []
  padded = np.array([*found] or [0] * size, np.int32)
  return [int(step) for step in multihost_utils.broadcast_one_to_all(padded)]
