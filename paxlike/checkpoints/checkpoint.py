# SPDX-License-Identifier: Apache-2.0
"""One complete checkpoint: verified, and restored onto any mesh and layout.

A training state is saved as a flat dict of arrays under dotted names. `checkpoint_00000100` is the
state after 100 updates: `state`, `metadata` (names, shapes, dtypes and layout), `train_input` (the
position in the data), and checksums of all files.
"""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from paxlike import file_io
from paxlike.checkpoints import checksums, layout_conversion, manifest, orbax_hooks
from paxlike.checkpoints.array_names import Flat
from paxlike.checkpoints.checksums import Checksums
from paxlike.errors import UserError
from paxlike.layers.stack_layout import Layout
from paxlike.processes import verdicts

# Size limit of the state of the data, which may have the answers of a step:
# see `training.reinforcement.pending`.
MAX_INPUT_BYTES = 16 * file_io.MAX_BYTES


class Restored(NamedTuple):
  """The contents of a checkpoint."""

  state: Flat
  metadata: dict[str, Any]
  train_input: dict[str, Any]


class Checkpoint:
  """A complete checkpoint, to read."""

  def __init__(self, path: epath.Path):
    """`path` is its folder; reads nothing yet."""
    import orbax.checkpoint as ocp

    self._ocp, self._path = ocp, path
    self._opened: tuple[dict[str, Any], Checksums | None] | None = None

  def restore(
    self,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    unread: layout_conversion.Unread | None = None,
  ) -> Restored:
    """Returns its contents with the shardings of `target`, converted to `layout`.

    Non-trainable state that the checkpoint lacks is zeros. Orbax's handlers are called directly:
    its checkpointers have barriers, at which the processes would wait for one that cannot read its
    shards.

    Args:
      target: Name -> shape, dtype and sharding of each array.
      layout: The layout of `target`.
      unread: Predicate that selects the arrays of the checkpoint that `target` may lack; if given,
        float dtypes may differ. None: `target` must have all arrays, in the saved dtypes.

    Raises:
      UserError: Names, shapes or dtypes differ (another experiment), or it is damaged.
    """
    ocp = self._ocp
    with self._reading():
      _, sums = self._described()
      if sums is None and jax.process_index() == 0:
        print(f"paxlike: {self._path} has no checksums: not verified.", file=sys.stderr)
      train_input = self._read_json("train_input", sums)
      _check_place(train_input)
    metadata, saved_layout, lacking = self.check(target, layout=layout, unread=unread)
    zeros = {n: target[n] for n in lacking}
    target = {n: leaf for n, leaf in target.items() if n not in lacking}
    source = layout_conversion.in_layout(target, layout, saved_layout)
    arguments = ocp.args.PyTreeRestore(
      source,
      restore_args=ocp.checkpoint_utils.construct_restore_args(source),
      partial_restore=True,  # `check` has already refused surplus arrays.
    )
    with self._reading(), _verifying(sums, source):
      state = self._arrays(arguments)
    state = layout_conversion.converted(state, saved_layout, target, layout)
    state |= {n: jnp.zeros(x.shape, x.dtype, device=x.sharding) for n, x in zeros.items()}
    return Restored(state, metadata, train_input)

  def check(
    self,
    target: Mapping[str, jax.ShapeDtypeStruct],
    *,
    layout: Layout,
    unread: layout_conversion.Unread | None = None,
  ) -> tuple[dict[str, Any], Layout, set[str]]:
    """Returns metadata, layout, and names of non-trainable state that the checkpoint lacks.

    Reads no array.

    Raises:
      UserError: `restore` would fail with this target.
    """
    with self._reading():
      metadata, _ = self._described()
      saved_layout = layout_conversion.layout_in(metadata)
    tensors = self.arrays()
    if unread is None and all(name.startswith(("params.", "extra.")) for name in tensors):
      raise UserError(
        f"{self._path} has weights but no training state: start a run in a new folder, with"
        f" --fdl.CHECKPOINT_RESTORE_PATH={self._path.parent.parent}"
      )
    if differences := layout_conversion.differences(
      tensors, saved_layout, target, layout, unread=unread
    ):
      shown = "; ".join(differences[:5])
      more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
      raise UserError(f"{self._path} is of another experiment: {shown}{more}.")
    return metadata, saved_layout, layout_conversion.lacking(tensors, saved_layout, target, layout)

  def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of its arrays by their stored names.

    Raises:
      UserError: It is damaged.
    """
    with self._reading():
      listed = self._described()[0]["tensors"]
      return {name: layout_conversion.tensor_of(*what) for name, what in listed.items()}

  def layout(self) -> Layout:
    """Returns the layout in which its weights are stored.

    Raises:
      UserError: It is damaged.
    """
    with self._reading():
      return layout_conversion.layout_in(self._described()[0])

  def has_training_state(self) -> bool:
    """Returns whether it has optimizer state; a converted model has only weights.

    Raises:
      UserError: It is damaged.
    """
    with self._reading():
      return any(name.startswith("opt_state.") for name in self._described()[0]["tensors"])

  def read(self, name: str) -> np.ndarray:
    """Returns one array by its stored name.

    Raises:
      UserError: It is missing or damaged.
    """
    how = {name: self._ocp.RestoreArgs(restore_type=np.ndarray)}
    args = self._ocp.args.PyTreeRestore({name: 0}, restore_args=how, partial_restore=True)
    with self._reading():
      metadata, sums = self._described()
      if name not in metadata["tensors"]:
        raise UserError(f"{self._path} has no array {name}.")
      if sums is not None:
        sums.verify(arrays=[name])
      return self._arrays(args)[name]

  def read_as(self, name: str, layout: Layout) -> np.ndarray:
    """Returns one array by its name in `layout`, whatever the layout it is stored in.

    Raises:
      UserError: It is missing or damaged.
    """
    stored, location = self.layout(), layout.locate(name)
    if location is None or stored == layout:
      return self.read(name)
    places = [stored.place(location.template, layer) for layer in location.layers]
    arrays = {array: self.read(array) for array in dict(places)}
    values = [arrays[array] if at is None else arrays[array][at] for array, at in places]
    if not location.stacked:
      return values[0]
    result = np.zeros((layout.stacked_size, *values[0].shape), values[0].dtype)
    result[list(location.indexes)] = values
    return result

  def verify(self) -> int | None:
    """Verifies all files and returns their number of bytes; None if it has no checksums.

    Raises:
      UserError: It is damaged.
    """
    with self._reading():
      _, sums = self._described()
      if sums is None:
        return None
      sums.verify(arrays=None)
      return sums.num_bytes

  def identity(self) -> str | None:
    """Returns a checksum of its arrays, equal for copies; None if unknown.

    Raises:
      UserError: It is damaged.
    """
    with self._reading():
      _, sums = self._described()
      return None if sums is None else sums.identity

  @contextlib.contextmanager
  def _reading(self) -> Iterator[None]:
    """Context that converts the errors of reading a damaged checkpoint to `Damaged`."""
    try:
      yield
    except UserError:
      raise
    except Exception as error:
      # For a truncated data file, Orbax raises Exception itself.
      known = (*orbax_hooks.failures(), KeyError, TypeError)  # The last two from JSON.
      is_foreseen = type(error) is Exception or isinstance(error, known)
      if not is_foreseen or verdicts.is_of_jax(error):
        raise
      reason = file_io.reason(error.__cause__ or error, within=self._path)
      raise checksums.damaged(self._path, reason) from error

  def _arrays(self, arguments: Any) -> Flat:
    """Returns the arrays that Orbax's restore arguments request."""
    with contextlib.closing(self._ocp.PyTreeCheckpointHandler()) as handler:
      found = handler.restore(self._path / "state", args=arguments)
    for name, array in found.items():
      if not isinstance(array, jax.Array | np.ndarray):  # Orbax returns the request if missing.
        raise ValueError(f"array {name} is missing")
    return found

  def _described(self) -> tuple[dict[str, Any], Checksums | None]:
    """Returns metadata and checksums; the first call verifies all but the arrays."""
    if self._opened is None:
      sums = checksums.read(self._path)
      metadata = self._read_json("metadata", sums)
      if not isinstance(metadata.get("tensors"), dict) or not metadata["tensors"]:
        raise ValueError("metadata/metadata lists no tensors")
      if metadata.get("checksums") and sums is None:
        raise checksums.damaged(self._path, f"{manifest.FILE} is missing")
      if sums is not None:
        sums = sums.among(metadata["tensors"])
        sums.verify(arrays=())
      self._opened = metadata, sums
    return self._opened

  def _read_json(self, item: str, sums: Checksums | None) -> dict[str, Any]:
    most = MAX_INPUT_BYTES if item == "train_input" else file_io.MAX_BYTES
    data = file_io.read_bytes(self._path / item / "metadata", limit=most)
    if sums is not None:
      sums.verify_file(f"{item}/metadata", data)
    found = json.loads(data)
    if not isinstance(found, dict):
      raise ValueError(f"{item}/metadata is not a JSON object")
    return found


def _check_place(train_input: Mapping[str, Any]):
  """Raises ValueError unless this is a position in the data, or {}: a converted model has none."""
  if not train_input:
    return
  for name in ("epoch", "position"):
    if not layout_conversion.is_size(train_input.get(name)):
      raise ValueError(f"train_input/metadata: {name} is {train_input.get(name)}")
  if not isinstance(train_input.get("fingerprint"), str):
    raise ValueError("train_input/metadata has no fingerprint of the data")


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
