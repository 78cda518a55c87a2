# SPDX-License-Identifier: Apache-2.0
"""Hooks into Orbax's saving: checksums are written before a checkpoint is committed.

Orbax calls them in the background: `_Measuring.result` in every process after that process has
written its arrays, and `Committing.finalize` in process 0 after all processes have.
"""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from etils import epath

from paxlike import file_io, run_folder
from paxlike.checkpoints import checksums, manifest
from paxlike.errors import RunError, UserError
from paxlike.processes import verdicts

_FOLDER = re.compile(r"checkpoint_([0-9]{8}|[1-9][0-9]{8,9})")
_LAST = 2**31 - 1  # The step counter is int32.
# Where several devices hold the same shard of an array, each writes a slice of the shard if the
# array has so many bytes; otherwise one writes it whole. A program is compiled for each shape and
# place of a slice, at the first save, while training waits.
_LEAST_SLICED = 1 << 27


class Unwritable(UserError):
  """A checkpoint could not be written."""


@contextlib.contextmanager
def writing(directory: epath.Path) -> Iterator[None]:
  """Context of writing checkpoints, in which errors of Orbax and the store become `Unwritable`.

  Errors of JAX are passed through: they may mean that another process is lost.
  """
  try:
    yield
  except (UserError, RunError):
    raise
  except failures() as error:
    if verdicts.is_of_jax(error):
      raise
    intact = " Older checkpoints are intact." if run_folder.has_checkpoints(directory) else ""
    reason = file_io.reason(error)
    raise Unwritable(
      f"a checkpoint could not be written in {directory}: {reason}.{intact}"
      f" {run_folder.advice(error)}"
    ) from error


def failures() -> tuple[type[Exception], ...]:
  """Returns the exceptions of failed reads and writes of Orbax and TensorStore."""
  return (OSError, ValueError, RuntimeError, *file_io.failures())


class _Measuring:
  """A future whose `result` writes checksums; Orbax calls it after writing the arrays."""

  def __init__(self, write: Callable[[], None]):
    self._write = write

  def result(self, timeout: float | None = None):
    """Writes the checksums; never waits."""
    del timeout
    self._write()

  def cancel(self):
    """Does nothing: nothing runs before `result`."""


def handlers(index: int) -> Any:
  """Returns Orbax's registry of the handlers that save a checkpoint's items in process `index`."""
  import orbax.checkpoint as ocp

  class State(ocp.StandardCheckpointHandler):
    """Saves arrays, and then the checksums of the data that this process has written."""

    def __init__(self):
      super().__init__()
      # Trained float32 is hardly compressible, and to try doubles the CPU-seconds of a save.
      self._impl = ocp.PyTreeCheckpointHandler(
        use_compression=False, type_handler_registry=_arrays()
      )

    async def async_save(self, directory: epath.Path, *unused: Any, **given: Any) -> list[Any]:
      futures = await super().async_save(directory, *unused, **given) or []
      return [*futures, _Measuring(lambda: manifest.write_of_process(directory, index))]

    @classmethod
    def typestr(cls) -> str:
      """Returns the handler name that the checkpoint records."""
      return ocp.StandardCheckpointHandler.typestr()

  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  registry.add("state", ocp.args.StandardSave, State())
  for item in ("metadata", "train_input"):
    registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
  return registry


def _arrays() -> Any:
  """Returns Orbax's registry of types with JAX's arrays alone, of which a state consists.

  By default, Orbax also writes the shapes of what each process has written, which nothing reads.
  """
  import jax
  import orbax.checkpoint as ocp

  least = _LEAST_SLICED // jax.device_count()
  arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=least)
  return ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))


def options(
  directory: epath.Path,
  *,
  before: Callable[[], None],
  after: Callable[[epath.Path], None],
) -> Any:
  """Returns the options of Orbax's checkpoint manager.

  Args:
    directory: The folder of checkpoints.
    before: Called before a commit; an exception prevents it.
    after: Called with a committed checkpoint.
  """
  import orbax.checkpoint as ocp

  path_class = _path_class(directory, before=before, after=after)
  return ocp.CheckpointManagerOptions(
    step_name_format=_names(path_class),
    cleanup_tmp_directories=True,
    temporary_path_class=path_class,
  )


def _path_class(
  directory: epath.Path, *, before: Callable[[], None], after: Callable[[epath.Path], None]
) -> Any:
  """Returns Orbax's class of the temporary path of a save; see `options`."""
  import orbax.checkpoint as ocp

  atomicity = ocp.path.atomicity
  choose: Any = ocp.path.atomicity_defaults.get_default_temporary_path_class
  base: Any = choose(directory)

  class Committing(base):
    """A checkpoint that is being written."""

    @classmethod
    def from_final(cls, final_path: epath.Path, **given: Any) -> Any:
      """Returns the path to write to; items need no commit of their own within the checkpoint."""
      if final_path.parent != directory:
        return atomicity.CommitFileTemporaryPath.from_final(final_path, **given)
      return super().from_final(final_path, **given)

    async def finalize(self):
      """Writes the checksums and commits."""
      folder, final = self.get(), self.get_final()
      # Orbax would change this file in `finalize`; it must be final before its checksum.
      if (store := self._checkpoint_metadata_store) is not None:
        store.wait_until_finished()
        now = time.time_ns()
        store.update(file_path=folder / "_CHECKPOINT_METADATA", commit_timestamp_nsecs=now)
        store.wait_until_finished()
        self._checkpoint_metadata_store = None
      success = f"Checkpoint commit was successful to {final}"
      manifest.write(folder, to_come={atomicity.COMMIT_SUCCESS_FILE: success.encode()})
      before()
      await super().finalize()
      after(final)

  return Committing


def _names(path_class: Any) -> Any:
  """Returns Orbax's name format of checkpoints, which finds only names that `step_of` accepts."""
  import orbax.checkpoint as ocp

  standard: Any = type(ocp.path.step.standard_name_format())

  class Names(standard):
    """The names of checkpoints."""

    def find_all(self, base_path: epath.PathLike) -> Iterator[Any]:
      """Yields Orbax's metadata of each committed checkpoint."""
      return (one for one in super().find_all(base_path) if step_of(one.path.name) is not None)

  return Names(step_prefix="checkpoint", step_format_fixed_length=8, temporary_path_cls=path_class)


def step_of(name: str) -> int | None:
  """Returns the step of a checkpoint's folder name; None if it is not such a name."""
  match = _FOLDER.fullmatch(name)
  step = int(match[1]) if match else None
  return None if step is None or step > _LAST else step


def check_older(folders: Iterable[epath.Path]):
  """Raises a UserError if an older checkpoint has a pipe in place of a file that Orbax reads."""
  for folder in folders:
    with run_folder.reading(folder):
      file_io.check_ends(folder / "_CHECKPOINT_METADATA")


def check_keep(keep: int | None):
  """Raises a UserError if `keep` is below 1: Orbax would delete each checkpoint after writing."""
  if keep is not None and keep < 1:
    raise UserError(
      f"CHECKPOINT_MAX_TO_KEEP={keep} would delete every checkpoint. It must be at least 1, or None"
      " to keep all; --enable_checkpoint_saving=False writes none."
    )


def not_kept(older: Sequence[int], *, keep: int | None, preserved: int | None) -> list[int]:
  """Returns the `older` steps to remove so that `keep` remain, including the new one."""
  if keep is None:
    return []
  kept = {*older[len(older) - min(keep - 1, len(older)) :], preserved}
  return [step for step in older if step not in kept]


def remove_after(newest: epath.Path, folders: Sequence[epath.Path]):
  """Verifies `newest`, then removes `folders`; keeps them if `newest` is damaged.

  Raises:
    OSError: Removing failed.
  """
  if not folders:
    return
  try:
    if (written := checksums.read(newest)) is not None:
      written.verify(arrays=None)
  except (UserError, *file_io.failures()) as error:
    reason = file_io.reason(error)
    print(f"paxlike: {reason}. Older checkpoints are kept.", file=sys.stderr)
    return
  for path in folders:
    if path.exists():
      _remove(path)


def _remove(folder: epath.Path):
  """Removes a checkpoint; readers stop finding it before its files are deleted.

  Raises:
    OSError: It failed.
  """
  import orbax.checkpoint as ocp

  atomicity = ocp.path.atomicity
  if file_io.is_remote(folder):
    (folder / atomicity.COMMIT_SUCCESS_FILE).unlink(missing_ok=True)
    folder.rmtree(missing_ok=True)
    return
  # Orbax removes folders of this name at the next start, in case this process is killed.
  leaving = folder.with_name(folder.name + atomicity.TMP_DIR_SUFFIX)
  folder.rename(leaving)
  leaving.rmtree(missing_ok=True)
