# SPDX-License-Identifier: Apache-2.0
"""What Orbax means on many hosts, and what we rely on.

Callee: orbax-checkpoint 0.12.8.
- options.py, `MultiprocessingOptions`: process 0 is primary, all processes are active: it alone
  makes folders, writes metadata and renames; the others wait for it. All must see *one* folder: two
  processes with node-local folders wait for each other without an end (seen for nine minutes).
- _src/path/atomicity_defaults.py: a local or network file system: a folder ...orbax-checkpoint-tmp
  that is renamed; gs://: the final folder, and it counts once it holds commit_success.txt.
- _src/serialization/replica_slices.py: a replicated array is written in parts by those that have
  it, if a dim divides by their number; `pinned_host` arrays whose last dim is no multiple of 128 by
  one replica.
- `CheckpointManager.save` copies to the host before it returns, so arrays may be donated.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint._src.path import atomicity, atomicity_defaults

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.layers.stack_layout import Layout

FLAT = Layout(scanned=False, repeats=0)


def test_what_is_complete_is_known_by_its_name_or_by_a_file():
  chosen = atomicity_defaults.get_default_temporary_path_class
  assert chosen(epath.Path("/runs/a")) is atomicity.AtomicRenameTemporaryPath
  assert chosen(epath.Path("gs://runs/a")) is atomicity.CommitFileTemporaryPath
  assert atomicity.COMMIT_SUCCESS_FILE == "commit_success.txt"


def test_a_folder_that_was_not_renamed_is_no_checkpoint(tmp_path):
  with Checkpoints(tmp_path, keep=None) as saved:
    saved.save(1, {"w": jax.numpy.arange(8.0)}, layout=FLAT, train_input={})
    saved.wait()
    path = saved.path(1)
    assert path.name == "checkpoint_00000001" and ocp.utils.is_checkpoint_finalized(path)
    path.rename(f"{path}.orbax-checkpoint-tmp")
    assert saved.steps() == []


def test_a_folder_of_a_step_that_no_state_can_count_is_no_checkpoint(tmp_path):
  """Orbax would take it for the newest, and save nothing older."""
  for name in ("checkpoint_3000000000", "checkpoint_" + "9" * 200):
    (tmp_path / name).mkdir()
  with Checkpoints(tmp_path, keep=None) as saved:
    saved.path(2**31 - 1).mkdir()
    assert saved.steps() == [2**31 - 1]
    saved.path(2**31 - 1).rmdir()
    for step in (1, 2):
      saved.save(step, {"w": jax.numpy.arange(8.0)}, layout=FLAT, train_input={})
    saved.wait()
    assert saved.steps() == [1, 2]


def test_process_0_is_primary_and_all_take_part():
  options = ocp.CheckpointManagerOptions().multiprocessing_options
  assert options.primary_host == 0 and options.active_processes is None


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
  w = jax.device_put(np.arange(1024.0, dtype=np.float32))
  with Checkpoints(tmp_path, keep=None) as saved:
    saved.save(1, {"w": w}, layout=FLAT, train_input={})
    w.delete()
    saved.wait()
    assert np.array_equal(saved.at(1).read("w"), np.arange(1024.0))


def test_finalizing_is_asked_of_a_function_that_is_not_async():
  """`is_checkpoint_finalized` is called without await: a coroutine would always be true."""
  found = ocp.utils.is_checkpoint_finalized(epath.Path("/nowhere/a"))
  assert found is False
