# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: saved asynchronously and whole or not at all, restored onto any mesh and layout.

A training state is saved as a flat dict of arrays under dotted names. `checkpoint_00000100` holds
100 completed updates: `state`, `metadata` (the names, shapes and dtypes; the layout) and
`train_input` (the position in the data).
"""

import dataclasses
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from paxlike.errors import UserError
from paxlike.layers.layout import Layout

Flat = dict[str, Any]

# How reading damaged files, and writing on a full disk, fail in Orbax, TensorStore and JSON.
_FAILED = (OSError, ValueError, KeyError, TypeError, RuntimeError)


class _Damaged(Exception):
  """A checkpoint cannot be read."""


class _Reading:
  """Context that turns whatever reading a damaged checkpoint raises into `_Damaged`."""

  def __enter__(self):
    pass

  def __exit__(self, kind: type | None, error: BaseException | None, unused: object):
    # For a data file cut short, Orbax raises Exception itself.
    if error is not None and (kind is Exception or isinstance(error, _FAILED)):
      raise _Damaged(_reason(error.__cause__ or error)) from error


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

  def __init__(self, directory: epath.PathLike, *, keep: int | None):
    """`keep` newest checkpoints stay when one is saved; None keeps all."""
    import orbax.checkpoint as ocp  # Here: it takes most of a second, and not every mode needs it.

    self._ocp = ocp
    self._directory = epath.Path(directory)
    self._options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      step_prefix="checkpoint",
      step_format_fixed_length=8,
      cleanup_tmp_directories=True,
    )
    self._manager: Any = None

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    if self._manager is not None:
      self._manager.close()

  def _open(self, step: int) -> Any:
    """Returns the manager, made by the first save: it removes unfinished saves, as no reader may.

    Checkpoints from `step` on could not be read, or the run would have gone on from them. They are
    moved aside, since Orbax saves nothing older than the newest.
    """
    if jax.process_index() == 0:
      for path in (self.path(newer) for newer in self.steps() if newer >= step):
        path.rename(self._directory / f"damaged_{path.name}_{time.time_ns()}")
    if jax.process_count() > 1:
      multihost_utils.sync_global_devices("damaged checkpoints are moved aside")
    return self._ocp.CheckpointManager(
      self._directory,
      options=self._options,
      item_names=("state", "metadata", "train_input"),
    )

  def steps(self) -> list[int]:
    """Returns the steps of all complete checkpoints, oldest first."""
    if not self._directory.exists():
      return []
    prefix = "checkpoint_"
    found = {p.name.removeprefix(prefix): p for p in self._directory.glob(f"{prefix}*")}
    complete = self._ocp.utils.is_checkpoint_finalized
    return sorted(int(step) for step, p in found.items() if step.isdigit() and complete(p))

  def latest(self) -> int | None:
    """Returns the newest step, None if there is none."""
    steps = self.steps()
    return steps[-1] if steps else None

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
    tensors = {name: [list(x.shape), str(x.dtype)] for name, x in state.items()}
    metadata = {
      "layout": dataclasses.asdict(layout),
      "tensors": tensors,
      "versions": {"jax": jax.__version__, "orbax": self._ocp.__version__},
    }
    try:
      self._manager = self._manager or self._open(step)
      taken = self._manager.save(
        step,
        args=save.Composite(
          state=save.StandardSave(dict(state)),
          metadata=save.JsonSave(metadata),
          train_input=save.JsonSave(train_input),
        ),
      )
    except _FAILED as error:
      raise self._unwritable(error) from error
    assert taken, f"checkpoint {step} is not newer than {self.latest()}"

  def wait(self):
    """Returns when everything is written.

    Raises:
      UserError: It could not be.
    """
    if self._manager is None:
      return
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except _FAILED as error:
      raise self._unwritable(error) from error

  def _unwritable(self, error: BaseException) -> UserError:
    return UserError(
      f"a checkpoint could not be written in {self._directory}: {_reason(error)} Older"
      " checkpoints are intact. Make room there or set another --job_log_dir; the same command"
      " resumes the run."
    )

  def restore(
    self,
    step: int,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    partial: bool = False,
  ) -> Restored:
    """Returns checkpoint `step` with the shardings of `target`, converted to `layout`.

    Args:
      step: Which checkpoint.
      target: Name -> shape, dtype and sharding of each array.
      layout: The layout of `target`.
      partial: Whether the checkpoint may hold more than `target`, which is then not read.

    Raises:
      UserError: The names, shapes or dtypes differ: it is of another experiment. Or it is damaged.
    """
    try:
      return self._restore(step, target, layout, partial=partial)
    except _Damaged as error:
      raise UserError(f"{self.path(step)} is damaged ({error}).") from error

  def _restore(
    self,
    step: int,
    target: Mapping[str, jax.ShapeDtypeStruct],
    layout: Layout,
    *,
    partial: bool = False,
  ) -> Restored:
    ocp = self._ocp
    with _Reading():
      metadata = self._read_json(step, "metadata")
      train_input = self._read_json(step, "train_input")
      saved_layout = Layout(**metadata["layout"])
      tensors = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        for name, (shape, dtype) in metadata["tensors"].items()
      }
    if differences := _differences(tensors, saved_layout, target, layout, partial=partial):
      shown = "\n".join(f"  {line}" for line in differences[:20])
      more = f"\n  and {len(differences) - 20} more" if len(differences) > 20 else ""
      raise UserError(f"{self.path(step)} is of another experiment:\n{shown}{more}")
    source = _in_layout(target, layout, saved_layout)
    arguments = ocp.args.PyTreeRestore(
      source,
      restore_args=ocp.checkpoint_utils.construct_restore_args(source),
      partial_restore=partial,
    )
    with _Reading(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      state = checkpointer.restore(self.path(step) / "state", args=arguments)
    state = _converted(state, saved_layout, target, layout)
    return Restored(state, metadata, train_input)

  def restore_latest_valid(
    self, target: Mapping[str, jax.ShapeDtypeStruct], *, layout: Layout
  ) -> tuple[int, Restored] | None:
    """Returns (step, contents) of the newest checkpoint that can be read, None if there is none.

    Raises:
      UserError: There are checkpoints but none can be read, or one is of another experiment.
    """
    steps = self.steps()
    for step in reversed(steps):
      try:
        return step, self._restore(step, target, layout)
      except _Damaged as error:
        print(f"paxlike: {self.path(step)} is damaged ({error})", file=sys.stderr)
    if steps:
      raise UserError(
        f"no checkpoint in {self._directory} can be read; move it away to start anew."
      )
    return None

  def _read_json(self, step: int, item: str) -> dict[str, Any]:
    with self._ocp.Checkpointer(self._ocp.JsonCheckpointHandler()) as checkpointer:
      return checkpointer.restore(self.path(step) / item)


def _reason(error: BaseException) -> str:
  return (str(error).strip() or repr(error)).splitlines()[0][:600]


def _by_layer(flat: Mapping[str, Any], layout: Layout) -> dict[tuple[str, int], tuple[Any, Any]]:
  """Returns (template, layer) -> (shape, dtype), the same for every layout."""
  result = {}
  for name, leaf in flat.items():
    location = layout.locate(name)
    if location is None:
      result[name, 0] = (tuple(leaf.shape), leaf.dtype)
    else:
      shape = tuple(leaf.shape)[1:] if location.stacked else tuple(leaf.shape)
      for layer in location.layers:
        result[location.template, layer] = (shape, leaf.dtype)
  return result


def _differences(
  saved: Mapping[str, Any],
  saved_layout: Layout,
  target: Mapping[str, Any],
  layout: Layout,
  *,
  partial: bool,
) -> list[str]:
  have, want = _by_layer(saved, saved_layout), _by_layer(target, layout)
  lines = []
  for key in have.keys() | want.keys():
    name = key[0].format(f"layers.{key[1]}")
    if key not in want:
      if not partial:
        lines.append(f"{name}: only in the checkpoint")
    elif key not in have:
      lines.append(f"{name}: not in the checkpoint")
    elif have[key] != want[key]:
      (shape, dtype), (wanted_shape, wanted_dtype) = have[key], want[key]
      lines.append(
        f"{name}: {dtype}{list(shape)} in the checkpoint,"
        f" {wanted_dtype}{list(wanted_shape)} in this experiment"
      )
  return sorted(lines)


def _in_layout(
  target: Mapping[str, jax.ShapeDtypeStruct], layout: Layout, other: Layout
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the arrays of `target` as `other` lays them out, sharded alike."""
  if layout == other:
    return dict(target)
  result = {}
  for name, leaf in target.items():
    location = layout.locate(name)
    if location is None:
      result[name] = leaf
      continue
    shape = leaf.shape[1:] if location.stacked else leaf.shape
    spec = _padded_spec(leaf)[1:] if location.stacked else _padded_spec(leaf)
    mesh = leaf.sharding.mesh
    for layer in location.layers:
      place, repeat = other.place(location.template, layer)
      if repeat is None:
        where = NamedSharding(mesh, PartitionSpec(*spec))
        result[place] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=where)
      else:
        where = NamedSharding(mesh, PartitionSpec(None, *spec))
        stacked = (other.repeats, *shape)
        result[place] = jax.ShapeDtypeStruct(stacked, leaf.dtype, sharding=where)
  return result


def _padded_spec(leaf: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
  spec = tuple(leaf.sharding.spec)
  return spec + (None,) * (len(leaf.shape) - len(spec))


def _converted(
  state: Flat, source: Layout, target: Mapping[str, jax.ShapeDtypeStruct], layout: Layout
) -> Flat:
  """Returns the arrays of `state` under the names, and with the shardings, of `target`."""
  if source == layout:
    return state

  def one(template: str, layer: int) -> jax.Array:
    name, repeat = source.place(template, layer)
    return state[name] if repeat is None else state[name][repeat]

  result = {}
  for name, leaf in target.items():
    location = layout.locate(name)
    if location is None:
      value = state[name]
    elif location.stacked:
      value = jnp.stack([one(location.template, layer) for layer in location.layers])
    else:
      value = one(location.template, location.layers[0])
    result[name] = jax.device_put(value, leaf.sharding)
  return result
