# SPDX-License-Identifier: Apache-2.0
import errno
import functools
import gc
import json
import pathlib
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from helpers.saved_arrays import FLAT, arrays, assert_bitwise, save, target_of
from helpers.tiny_model import place

from paxlike.checkpoints import orbax_hooks
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.devices.mesh import MeshSpec
from paxlike.errors import UserError


def test_a_relative_folder_is_read_too(saved, monkeypatch):
  state = arrays()
  save(saved, 7, state)
  monkeypatch.chdir(saved.path(7).parent.parent)
  relative = Checkpoints("checkpoints", keep=None)
  assert_bitwise(relative.at(7).restore(target_of(state), layout=FLAT).state, state)
  assert Checkpoints("gs://bucket/run", keep=None).path(7) == epath.Path(
    "gs://bucket/run/checkpoint_00000007"
  )


def test_arrays_may_be_donated_right_after_save(saved):
  state = {"w": jnp.arange(1_000_000, dtype=jnp.float32)}
  overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
  saved.save(1, state, layout=FLAT, train_input={})
  overwrite(state["w"]).block_until_ready()
  saved.wait()
  shapes = {"w": jax.ShapeDtypeStruct((1_000_000,), jnp.float32)}
  restored = saved.at(1).restore(target_of(shapes), layout=FLAT)
  np.testing.assert_array_equal(restored.state["w"], np.arange(1_000_000))


def test_threads_take_their_usual_turns_after_a_save(saved):
  usual, during = sys.getswitchinterval(), []
  folder = saved.path(1).parent
  with Checkpoints(
    folder, keep=1, preserved=lambda: during.append(sys.getswitchinterval())
  ) as checkpoints:
    save(checkpoints, 1)
  assert during[0] < usual == sys.getswitchinterval()
  with pytest.raises(UserError, match="did not restore"):
    Checkpoints(folder, keep=None).save(1, arrays(), layout=FLAT, train_input={})
  assert sys.getswitchinterval() == usual


def test_arrays_are_not_compressed(saved):
  save(saved, 1, {"w": jnp.ones(1_000_000)})
  files = [path for path in pathlib.Path(saved.path(1)).rglob("*") if path.is_file()]
  assert sum(path.stat().st_size for path in files) > 4_000_000


def test_only_large_arrays_are_cut_into_a_slice_for_each_device(saved, monkeypatch):
  """Each shape and place of a slice takes a compilation, while training waits."""
  cut = []
  monkeypatch.setattr(orbax_hooks, "_LEAST_SLICED", 1 << 16)
  slice_in_dim = jax.lax.slice_in_dim
  monkeypatch.setattr(
    jax.lax,
    "slice_in_dim",
    lambda x, *given, **by: cut.append(x.nbytes) or slice_in_dim(x, *given, **by),
  )
  everywhere = MeshSpec(ici=(8, 1, 1)).build()
  whole = jax.sharding.NamedSharding(everywhere, jax.sharding.PartitionSpec())
  small, large = np.ones((8, 128)), np.arange(8 * 4096).reshape(8, 4096)
  state = {name: jax.device_put(x.astype("f4"), whole) for name, x in [("s", small), ("l", large)]}
  save(saved, 1, state)
  assert cut == [large.size * 4] * 8
  restored = saved.at(1).restore(target_of(state), layout=FLAT)
  assert_bitwise(restored.state, state)


def test_the_newest_are_kept(saved):
  for step in range(1, 6):
    save(saved, step)
  assert saved.steps() == [3, 4, 5]
  assert saved.latest() == 5


def cut(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# Orbax leaves coroutines behind that fail when they are collected: here, and in no later test.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("item", ["state", "metadata", "train_input"])
@pytest.mark.parametrize("damage", [cut, pathlib.Path.unlink])
def test_a_damaged_checkpoint_is_passed_over_and_kept(saved, capsys, item, damage):
  for step in (1, 2):
    save(saved, step, arrays(step))
  folder = saved.path(2)
  found = pathlib.Path(folder / item).rglob("*")
  files = [p for p in found if p.is_file() and p.name != "commit_success.txt"]
  damage(max(files, key=lambda path: path.stat().st_size))
  step, restored = saved.restore_latest_valid(target_of(arrays()), layout=FLAT)
  assert step == 1
  assert_bitwise(restored.state, arrays(1))
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1, lines
  assert "checkpoint_00000002 is damaged" in lines[0]
  with pytest.raises(UserError, match="checkpoint_00000002 is damaged"):
    saved.at(2).restore(target_of(arrays()), layout=FLAT)
  gc.collect()
  with Checkpoints(folder.parent, keep=3) as resumed:
    with pytest.raises(UserError, match="checkpoint 2, which this run did not restore"):
      save(resumed, 2, arrays(3))
    assert saved.steps() == [1, 2]
    resumed.restore_latest_valid(target_of(arrays()), layout=FLAT)
    save(resumed, 2, arrays(3))
  again = saved.at(2).restore(target_of(arrays()), layout=FLAT)
  assert_bitwise(again.state, arrays(3))
  assert len(list(folder.parent.glob("damaged_checkpoint_00000002*"))) == 1


def _in_tensors(change):
  return lambda metadata: metadata["tensors"].update({"params.a.w": change})


NO_DESCRIPTIONS = {
  **{f"tensors {value}": {"tensors": value} for value in ([], {}, None, "x", {"a": 3})},
  "tensors a": {"tensors": {"a": []}},
  **{
    f"shape {shape}": _in_tensors([shape, "float32"]) for shape in ([-1, 2], [2**70], [1.5, 2], 3)
  },
  **{f"dtype {dtype}": _in_tensors([[8, 4], dtype]) for dtype in ("O", "no", None, ["f4"], "S3")},
  **{
    f"layout {name}={value}": {"layout": {"scanned": False, "repeats": 0, name: value}}
    for name, value in (("scanned", 3), ("repeats", 10**30), ("chunks", 0), ("prologue", None))
  },
}


def without_checksums(folder, damage=None):
  """Makes a checkpoint one of an earlier version; `damage` changes its metadata."""
  (folder / "checksums.json").unlink()
  (folder / "checksums").rmtree()
  file = folder / "metadata" / "metadata"
  metadata = json.loads(file.read_text())
  del metadata["checksums"]
  if callable(damage):
    damage(metadata)
  file.write_text(json.dumps(metadata | ({} if callable(damage) else damage or {})))


@pytest.mark.parametrize("damage", NO_DESCRIPTIONS.values(), ids=NO_DESCRIPTIONS)
def test_without_checksums_too_a_damaged_description_is_passed_over(saved, damage):
  save(saved, 1)
  save(saved, 2)
  without_checksums(saved.path(1))
  without_checksums(saved.path(2), damage)
  found = saved.restore_latest_valid(target_of(arrays()), layout=FLAT)
  assert found is not None and found[0] == 1


@pytest.mark.parametrize(
  "change", [{"position": -1}, {"epoch": 10**30}, {"epoch": 1.5}, {"fingerprint": 5}, None]
)
def test_without_checksums_too_a_damaged_place_is_passed_over(saved, change):
  save(saved, 1)
  save(saved, 2)
  without_checksums(saved.path(2))
  damaged = [["a", 1]] if change is None else place(2) | change
  (saved.path(2) / "train_input" / "metadata").write_text(json.dumps(damaged))
  found = saved.restore_latest_valid(target_of(arrays()), layout=FLAT)
  assert found is not None and found[0] == 1


def test_a_run_that_goes_on_from_an_older_checkpoint_saves_before_the_damaged(saved):
  for step in (1, 5):
    save(saved, step)
  (saved.path(5) / "metadata" / "metadata").write_text("{")
  with Checkpoints(saved.path(5).parent, keep=3) as resumed:
    resumed.restore_latest_valid(target_of(arrays()), layout=FLAT)
    save(resumed, 3, arrays(3))
    save(resumed, 5, arrays(5))
    assert resumed.steps() == [1, 3, 5]
  assert_bitwise(saved.at(5).restore(target_of(arrays()), layout=FLAT).state, arrays(5))


def test_if_all_are_damaged_nothing_is_overwritten(saved):
  save(saved, 1)
  (saved.path(1) / "metadata" / "metadata").write_text("{")
  with pytest.raises(UserError, match=r"no checkpoint in .* can be read"):
    saved.restore_latest_valid(target_of(arrays()), layout=FLAT)
  assert saved.steps() == [1]


def test_keeping_none_is_refused(tmp_path):
  with pytest.raises(UserError, match="CHECKPOINT_MAX_TO_KEEP=0"):
    Checkpoints(tmp_path / "c", keep=0)


@pytest.fixture
def small_files():
  """No file can grow beyond 100 kB, as on a disk that fills up."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
  yield
  resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def large(seed):
  bits = np.random.default_rng(seed).integers(0, 2**32, 100_000, dtype=np.uint32)
  return {"w": jnp.array(bits)}


@pytest.mark.parametrize("told_by", ["wait", "save", "end"])
def test_a_full_disk_is_told_and_older_checkpoints_stay(tmp_path, small_files, told_by):
  checkpoints = Checkpoints(tmp_path / "c", keep=1)
  told = pytest.raises(UserError, match=r"could not be written in .*Older checkpoints are intact")
  with told, checkpoints:
    save(checkpoints, 1)
    checkpoints.save(2, large(2), layout=FLAT, train_input={})
    if told_by == "wait":
      checkpoints.wait()
    elif told_by == "save":
      checkpoints.save(3, arrays(), layout=FLAT, train_input={})
  assert checkpoints.steps() == [1]
  assert_bitwise(checkpoints.at(1).restore(target_of(arrays()), layout=FLAT).state, arrays())


def test_of_no_older_checkpoint_nothing_is_said(tmp_path, small_files):
  with pytest.raises(UserError) as caught, Checkpoints(tmp_path / "c", keep=1) as checkpoints:
    checkpoints.save(2, large(2), layout=FLAT, train_input={})
    checkpoints.wait()
  assert "could not be written" in str(caught.value) and "intact" not in str(caught.value)


def test_a_full_disk_does_not_hide_what_ended_the_run(tmp_path, small_files, capfd):
  with pytest.raises(KeyError, match="the cause"), Checkpoints(tmp_path / "c", keep=1) as saving:
    saving.save(1, large(1), layout=FLAT, train_input={})
    raise KeyError("the cause")
  assert "paxlike: a checkpoint could not be written" in capfd.readouterr().err


def test_what_json_cannot_hold_is_no_full_disk(saved):
  with pytest.raises(TypeError, match="not JSON serializable"):
    saved.save(1, arrays(), layout=FLAT, train_input={"position": object()})
    saved.wait()
  assert saved.steps() == []


def test_a_save_that_was_killed_is_not_seen(tmp_path):
  directory = tmp_path / "checkpoints"
  with Checkpoints(directory, keep=3) as checkpoints:
    save(checkpoints, 1)
  # What Orbax leaves when it is killed on the way.
  half = directory / "checkpoint_00000002.orbax-checkpoint-tmp"
  (half / "state").mkdir(parents=True)
  with Checkpoints(directory, keep=3) as checkpoints:
    assert checkpoints.steps() == [1]
    # What a reader sees may be the save of a job that runs.
    assert checkpoints.restore_latest_valid(target_of(arrays()), layout=FLAT) is not None
    assert half.exists()
    save(checkpoints, 2)
    assert checkpoints.steps() == [1, 2]
  assert not half.exists()


def test_reading_makes_no_folder(tmp_path):
  with Checkpoints(tmp_path / "none", keep=3) as checkpoints:
    assert checkpoints.steps() == []
    assert checkpoints.restore_latest_valid(target_of(arrays()), layout=FLAT) is None
  assert not (tmp_path / "none").exists()


def test_only_what_writing_raises_is_no_write(tmp_path):
  """JAX's errors are not: there, another process may be gone."""
  writing = functools.partial(orbax_hooks.writing, tmp_path)
  with pytest.raises(orbax_hooks.Unwritable, match="No space left"), writing():
    raise OSError(errno.ENOSPC, "No space left on device")
  for error in (jax.errors.JaxRuntimeError("INTERNAL: Gloo AllGather failed"), UserError("no")):
    with pytest.raises(type(error)) as found, writing():
      raise error
    assert found.value is error
