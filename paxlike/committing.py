# SPDX-License-Identifier: Apache-2.0
"""Hooks in Orbax's saving: checksums are made before a checkpoint becomes whole.

Orbax calls them behind the training loop: the future's in every process once it has written its
arrays, `finalize` in process 0 once all have.
"""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from etils import epath

from paxlike import checksums, ending, run_folder
from paxlike.errors import RunError, UserError

_FOLDER = re.compile(r"checkpoint_([0-9]{8}|[1-9][0-9]{8,})")


class Unwritable(UserError):
  """A checkpoint could not be written."""


@contextlib.contextmanager
def writing(directory: epath.Path) -> Iterator[None]:
  """Context of writing checkpoints, in which errors of Orbax and the store become `Unwritable`.

  Errors of JAX's programs do not: there, another process may be gone.
  """
  try:
    yield
  except (UserError, RunError):
    raise
  except failures() as error:
    if ending.is_of_jax(error):
      raise
    intact = " Older checkpoints are intact." if run_folder.has_checkpoints(directory) else ""
    reason = run_folder.reason(error)
    raise Unwritable(
      f"a checkpoint could not be written in {directory}: {reason}.{intact}"
      f" {run_folder.advice(error)}"
    ) from error


def failures() -> tuple[type[Exception], ...]:
  """Returns the errors by which Orbax and TensorStore fail to read or write."""
  return (OSError, ValueError, RuntimeError, *run_folder.failures())


class _Measuring:
  """A future for Orbax.

  Orbax calls `result` once the arrays are written; it then writes their checksums.
  """

  def __init__(self, write: Callable[[], None]):
    self._write = write

  def result(self, timeout: float | None = None):
    """Writes them; it does not wait."""
    del timeout
    self._write()

  def cancel(self):
    """Does nothing: nothing has begun."""


def handlers(index: int) -> Any:
  """Returns Orbax's registry of what saves the items of a checkpoint in process `index`."""
  import orbax.checkpoint as ocp

  class State(ocp.StandardCheckpointHandler):
    """Saves arrays, and then the checksums of those that this process has written."""

    async def async_save(self, directory: epath.Path, *unused: Any, **given: Any) -> list[Any]:
      futures = await super().async_save(directory, *unused, **given) or []
      return [*futures, _Measuring(lambda: checksums.write_of_process(directory, index))]

    @classmethod
    def typestr(cls) -> str:
      """Returns the name under which the checkpoint says who wrote it."""
      return ocp.StandardCheckpointHandler.typestr()

  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  registry.add("state", ocp.args.StandardSave, State())
  for item in ("metadata", "train_input"):
    registry.add(item, ocp.args.JsonSave, ocp.JsonCheckpointHandler())
  return registry


def path_class(
  directory: epath.Path,
  *,
  before: Callable[[], None],
  after: Callable[[epath.Path], None],
) -> Any:
  """Returns Orbax's class of a path that is written to.

  Args:
    directory: Of the checkpoints.
    before: Called before a checkpoint becomes whole; what it raises prevents that.
    after: Called with a checkpoint that has become whole.
  """
  import orbax.checkpoint as ocp

  atomicity = ocp.path.atomicity
  choose: Any = ocp.path.atomicity_defaults.get_default_temporary_path_class
  base: Any = choose(directory)

  class Committing(base):
    """A checkpoint that is being written."""

    @classmethod
    def from_final(cls, final_path: epath.Path, **given: Any) -> Any:
      """Returns where to write; the items lie in a folder that becomes a checkpoint as a whole."""
      if final_path.parent != directory:
        return atomicity.CommitFileTemporaryPath.from_final(final_path, **given)
      return super().from_final(final_path, **given)

    async def finalize(self):
      """Makes it whole."""
      folder, final = self.get(), self.get_final()
      # The last of Orbax's changes to this file comes with `finalize`: before its checksum.
      if (store := self._checkpoint_metadata_store) is not None:
        store.wait_until_finished()
        now = time.time_ns()
        store.update(file_path=folder / "_CHECKPOINT_METADATA", commit_timestamp_nsecs=now)
        store.wait_until_finished()
        self._checkpoint_metadata_store = None
      said = f"Checkpoint commit was successful to {final}"
      checksums.write(folder, to_come={atomicity.COMMIT_SUCCESS_FILE: said.encode()})
      before()
      await super().finalize()
      after(final)

  return Committing


def step_of(name: str) -> int | None:
  """Returns the step whose checkpoint has a folder of this name, None if it is of none."""
  match = _FOLDER.fullmatch(name)
  return int(match[1]) if match else None


def check_older(folders: Iterable[epath.Path]):
  """Raises a UserError if Orbax, when it saves, would wait for a pipe in an older checkpoint."""
  for folder in folders:
    with run_folder.reading(folder):
      run_folder.check_ends(folder / "_CHECKPOINT_METADATA")


def check_keep(keep: int | None):
  """Raises a UserError if no checkpoint would be kept: Orbax would delete each once written."""
  if keep is not None and keep < 1:
    raise UserError(
      f"CHECKPOINT_MAX_TO_KEEP={keep} would delete every checkpoint. It must be at least 1, or None"
      " to keep all; --enable_checkpoint_saving=False writes none."
    )


def not_kept(older: Sequence[int], *, keep: int | None, preserved: int | None) -> list[int]:
  """Returns which of the `older` steps go where `keep` stay, a new one among them."""
  if keep is None:
    return []
  staying = {*older[len(older) - min(keep - 1, len(older)) :], preserved}
  return [step for step in older if step not in staying]


def remove_after(newest: epath.Path, folders: Sequence[epath.Path]):
  """Removes older checkpoints once `newest` is verified; if that is damaged they stay.

  Raises:
    OSError: It failed.
  """
  if not folders:
    return
  try:
    if (written := checksums.read(newest)) is not None:
      written.verify(arrays=None)
  except (UserError, *run_folder.failures()) as error:
    reason = run_folder.reason(error)
    print(f"paxlike: {reason}. Older checkpoints stay.", file=sys.stderr)
    return
  for path in folders:
    if path.exists():
      _remove(path)


def _remove(folder: epath.Path):
  """Removes a checkpoint; no reader finds it once that has begun.

  Raises:
    OSError: It failed.
  """
  import orbax.checkpoint as ocp

  atomicity = ocp.path.atomicity
  if run_folder.is_remote(folder):
    (folder / atomicity.COMMIT_SUCCESS_FILE).unlink(missing_ok=True)
    folder.rmtree(missing_ok=True)
    return
  # What Orbax removes when it finds it, should this be killed.
  leaving = folder.with_name(folder.name + atomicity.TMP_DIR_SUFFIX)
  folder.rename(leaving)
  leaving.rmtree(missing_ok=True)
