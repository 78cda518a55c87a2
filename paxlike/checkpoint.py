# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved asynchronously and whole or not at all, restored onto any mesh and layout.

A training state is saved as a flat dict of arrays under dotted names. `checkpoint_00000100` holds
100 completed updates: `state`, `metadata` (the names, shapes and dtypes; the layout),
`train_input` (the position in the data), and the checksums of all of it.
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

from paxlike import checksums, committing, ending, relayout, run_folder
from paxlike.checksums import Checksums, Damaged
from paxlike.errors import RunError, UserError, one_line
from paxlike.layers.layout import Layout

Flat = dict[str, Any]


class Restored(NamedTuple):
  """What a checkpoint holds."""

  state: Flat
  metadata: dict[str, Any]
  train_input: dict[str, Any]


def flatten(tree: Any) -> Flat:
  """Returns the leaves of a pytree under dotted names, such as "params.embedding.table"."""
  return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def unflatten(like: Any, flat: Mapping[str, Any]) -> Any:
  """Returns a pytree of the structure of `like` with the leaves that `flatten` would name so."""
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
  ):
    """When one is saved the `keep` newest stay, None keeps all, and that of step `preserved()`.

    An older one goes only when the new one has been verified. `check_owner` raises if this process
    may write no more.

    Raises:
      UserError: None would be kept.
    """
    committing.check_keep(keep)
    import orbax.checkpoint as ocp  # Here: it takes most of a second, and not every mode needs it.

    self._ocp = ocp
    self._directory = run_folder.absolute(directory)  # Orbax reads no relative path.
    self._keep, self._preserved, self._check_owner = keep, preserved, check_owner
    self._damaged: set[int] = set()  # What `restore_latest_valid` has passed over.
    self._not_kept: list[epath.Path] = []  # What goes when the checkpoint being saved is whole.
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
      # What ends the run matters more, and must not be hidden.
      if isinstance(error, UserError | RunError) and not issubclass(kind, committing.Unwritable):
        print(f"paxlike: {one_line(error)}", file=sys.stderr)

  def _open(self, step: int) -> Any:
    """Returns the manager, made by the first save: it removes unfinished saves, as no reader may.

    Checkpoints from `step` on that were found damaged are moved aside, since Orbax saves nothing
    older than the newest.

    Raises:
      UserError: One of them is not damaged.
    """
    newer = [other for other in self.steps() if other >= step]
    if whole := [str(other) for other in newer if other not in self._damaged]:
      raise UserError(
        f"{self._directory} holds checkpoint {', '.join(whole)}, which this run has not read: it"
        f" cannot save {step} after it."
      )
    if jax.process_index() == 0:
      for path in map(self.path, newer):
        path.rename(self._directory / f"damaged_{path.name}_{time.time_ns()}")
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
    options = self._ocp.CheckpointManagerOptions(
      step_prefix="checkpoint",
      step_format_fixed_length=8,
      cleanup_tmp_directories=True,
      temporary_path_class=committing.path_class(
        self._directory,
        before=self._check_owner,
        after=lambda newest: committing.remove_after(newest, self._not_kept),
      ),
    )
    registry = committing.handlers(jax.process_index())
    return self._ocp.CheckpointManager(self._directory, options=options, handler_registry=registry)

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, oldest first."""
    complete = self._ocp.utils.is_checkpoint_finalized
    with run_folder.reading(self._directory):
      paths = run_folder.beginning_with(self._directory, "checkpoint_")
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
    raise UserError(f"no {wanted} in {self._directory}; there is: {known}.")

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
    """Copies the state and returns; writing goes on behind. The caller may donate the arrays.

    Raises:
      UserError: This, or the save before, could not be written; older checkpoints are intact.
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
      taken = self._manager.save(
        step,
        args=save.Composite(
          state=save.StandardSave(dict(state)),
          metadata=save.JsonSave(metadata),
          train_input=save.JsonSave(train_input),
        ),
      )
    assert taken, f"checkpoint {step} is not newer than {self.latest()}"

  def wait(self):
    """Returns when everything is written.

    Raises:
      UserError: It could not be.
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
    unread: relayout.Unread | None = None,
  ) -> Restored:
    """Returns checkpoint `step` with the shardings of `target`, converted to `layout`.

    Non-trainable state that the checkpoint lacks is zeros.
    Orbax's handlers are called themselves: its checkpointers make processes wait for each other,
    which one that cannot read its part would not do.

    Args:
      step: Which checkpoint.
      target: Name -> shape, dtype and sharding of each array.
      layout: The layout of `target`.
      unread: Which arrays of the checkpoint `target` may lack, any float dtype being right then.
        None: none.

    Raises:
      UserError: The names, shapes or dtypes differ: it is of another experiment. Or it is damaged.
    """
    ocp = self._ocp
    with self._reading(step):
      _, sums = self._described(step)
      if sums is None and jax.process_index() == 0:
        print(f"paxlike: {self.path(step)} has no checksums: not verified.", file=sys.stderr)
      train_input = self._read_json(step, "train_input", sums)
      for name in ("epoch", "position"):
        if not relayout.is_size(train_input.get(name, 0)):
          raise ValueError(f"train_input/metadata: no place in data is {name} {train_input[name]}")
    metadata, saved_layout, lacking = self.check(step, target, layout=layout, unread=unread)
    zeros = {n: target[n] for n in lacking}
    target = {n: leaf for n, leaf in target.items() if n not in lacking}
    source = relayout.in_layout(target, layout, saved_layout)
    arguments = ocp.args.PyTreeRestore(
      source,
      restore_args=ocp.checkpoint_utils.construct_restore_args(source),
      partial_restore=True,  # `check` has refused surplus arrays already.
    )
    with self._reading(step), _verifying(sums, source):
      state = self._arrays(step, arguments)
    state = relayout.converted(state, saved_layout, target, layout)
    state |= {n: jnp.zeros(x.shape, x.dtype, device=x.sharding) for n, x in zeros.items()}
    return Restored(state, metadata, train_input)

  def check(
    self,
    step: int,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    unread: relayout.Unread | None = None,
  ) -> tuple[dict[str, Any], Layout, set[str]]:
    """Returns the metadata of a checkpoint, its layout, and the non-trainable state that it lacks.

    It reads no array.

    Raises:
      UserError: It cannot give `target`: see `restore`.
    """
    with self._reading(step):
      metadata, _ = self._described(step)
      saved_layout = relayout.layout_in(metadata)
      tensors = {name: relayout.tensor_of(*listed) for name, listed in metadata["tensors"].items()}
    if unread is None and all(name.startswith("params.") for name in tensors):
      raise UserError(
        f"{self.path(step)} holds weights and no training state: begin a run in a new folder, with"
        f" --fdl.CHECKPOINT_RESTORE_PATH={self._directory.parent}"
      )
    if differences := relayout.differences(tensors, saved_layout, target, layout, unread=unread):
      shown = "; ".join(differences[:5])
      more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
      raise UserError(f"{self.path(step)} is of another experiment: {shown}{more}.")
    return metadata, saved_layout, relayout.lacking(tensors, saved_layout, target, layout)

  def restore_latest_valid(
    self, target: Mapping[str, jax.ShapeDtypeStruct], *, layout: Layout
  ) -> tuple[int, Restored] | None:
    """Returns (step, contents) of the newest checkpoint that can be read, None if there is none.

    Raises:
      UserError: There are checkpoints but none can be read, or one is of another experiment.
    """
    steps = agreed(self.steps)
    for step in reversed(steps):
      restored = None
      reason = f"{self.path(step)} is damaged (another process cannot read its part)."
      try:
        restored = self.restore(step, target, layout=layout)
      except Damaged as error:
        reason = str(error)
      if everywhere(restored is not None) and restored is not None:
        committing.check_older(self.path(other) for other in steps if other < step)
        return step, restored
      del restored  # Before the next one is read: there may be no room for two.
      self._damaged.add(step)
      print(f"paxlike: {one_line(reason)}", file=sys.stderr)
    if steps:
      raise UserError(
        f"no checkpoint in {self._directory} can be read; move it away to start anew."
      )
    return None

  def layout(self, step: int) -> Layout:
    """Returns the layout in which a checkpoint's weights are stored.

    Raises:
      UserError: It is damaged.
    """
    with self._reading(step):
      return relayout.layout_in(self._described(step)[0])

  def read(self, step: int, name: str) -> np.ndarray:
    """Returns one array under the name that it is stored by.

    Raises:
      UserError: It is not there, or damaged.
    """
    how = {name: self._ocp.RestoreArgs(restore_type=np.ndarray)}
    args = self._ocp.args.PyTreeRestore({name: 0}, restore_args=how, partial_restore=True)
    with self._reading(step):
      metadata, sums = self._described(step)
      if name not in metadata["tensors"]:
        raise UserError(f"{self.path(step)} holds no array {name}.")
      if sums is not None:
        sums.verify(arrays=[name])
      return self._arrays(step, args)[name]

  def verify(self, step: int) -> int | None:
    """Returns how many bytes of a checkpoint are as they were written; None: it has no checksums.

    Raises:
      UserError: Not all of them are.
    """
    with self._reading(step):
      _, sums = self._described(step)
      if sums is None:
        return None
      sums.verify(arrays=None)
      return sums.num_bytes

  @contextlib.contextmanager
  def _reading(self, step: int) -> Iterator[None]:
    """Context that turns whatever reading a damaged checkpoint raises into `Damaged`."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      # For a data file cut short, Orbax raises Exception itself.
      known = (*committing.failures(), KeyError, TypeError)  # The last two of JSON.
      is_foreseen = type(error) is Exception or isinstance(error, known)
      if not is_foreseen or ending.is_of_jax(error):
        raise
      reason = run_folder.reason(error.__cause__ or error)
      raise checksums.damaged(self.path(step), reason) from error

  def _arrays(self, step: int, arguments: Any) -> Flat:
    """Returns arrays of a checkpoint."""
    with contextlib.closing(self._ocp.PyTreeCheckpointHandler()) as handler:
      found = handler.restore(self.path(step) / "state", args=arguments)
    for name, array in found.items():
      if not isinstance(array, jax.Array | np.ndarray):  # Orbax returns what it was asked with.
        raise ValueError(f"array {name} is missing")
    return found

  def _described(self, step: int) -> tuple[dict[str, Any], Checksums | None]:
    """Returns the metadata of a checkpoint, and its checksums if it was written with them.

    All of it but the arrays is verified when it is first read here.
    """
    if step not in self._opened:
      sums = checksums.read(self.path(step))
      metadata = self._read_json(step, "metadata", sums)
      if not isinstance(metadata.get("tensors"), dict):
        raise ValueError("metadata/metadata lists no tensors")
      if metadata.get("checksums") and sums is None:
        raise checksums.damaged(self.path(step), f"{checksums.FILE} is missing")
      if sums is not None:
        sums = sums.among(metadata["tensors"])
        sums.verify(arrays=())
      self._opened[step] = metadata, sums
    return self._opened[step]

  def _read_json(self, step: int, item: str, sums: Checksums | None) -> dict[str, Any]:
    data = run_folder.read_bytes(self.path(step) / item / "metadata")
    if sums is not None:
      sums.verify_file(f"{item}/metadata", data)
    found = json.loads(data)
    if not isinstance(found, dict):
      raise ValueError(f"{item}/metadata is no object of JSON")
    return found


def _verifying(
  sums: Checksums | None, arrays: Collection[str]
) -> contextlib.AbstractContextManager[None]:
  """Returns a context beside which arrays are verified; processes share the work."""
  if sums is None:
    return contextlib.nullcontext()
  return sums.verifying(arrays=arrays, index=jax.process_index(), count=jax.process_count())


def metadata_of(state: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
  """Returns what a checkpoint says of arrays, or of their shapes and dtypes."""
  import orbax.checkpoint as ocp

  return {
    "layout": dataclasses.asdict(layout),
    "tensors": {name: [list(x.shape), str(x.dtype)] for name, x in state.items()},
    "versions": {"jax": jax.__version__, "orbax": ocp.__version__},
    "checksums": True,
  }


def everywhere(here: bool) -> bool:
  """Returns whether it is so in all processes; each must call this."""
  if jax.process_count() == 1:
    return here
  return bool(np.all(multihost_utils.process_allgather(np.array(here))))


def agreed(find: Callable[[], Sequence[int]]) -> list[int]:
  """Returns in all processes the steps that process 0 finds; each must call this.

  A run may save and delete checkpoints meanwhile: others would find other ones.
  """
  if jax.process_count() == 1:
    return list(find())
  found = np.array(find() if jax.process_index() == 0 else [], np.int32)
  (size,) = multihost_utils.broadcast_one_to_all(np.array([found.size], np.int32))
  if not size:
    return []
  padded = found if found.size else np.zeros(size, np.int32)
  return [int(step) for step in multihost_utils.broadcast_one_to_all(padded)]
