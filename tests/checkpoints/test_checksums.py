# SPDX-License-Identifier: Apache-2.0
import gc
import json
import os
import pathlib
import shutil

import jax
import pytest
from etils import epath
from helpers.flip_bits import LAYOUT, Converted, Run, flip, state, weights

from paxlike.checkpoints import checksums, layout_conversion, manifest, orbax_hooks
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.cli import verify
from paxlike.data.synthetic import RandomTokens
from paxlike.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def no_coroutine_left():
  """Orbax leaves coroutines behind that fail when collected: here, and in no later test."""
  yield
  gc.collect()


def saved_in(folder, *, steps, keep=None):
  with Checkpoints(folder, keep=keep) as saved:
    for step in steps:
      saved.save(step, state(step), layout=LAYOUT, train_input={})
      saved.wait()
  return saved


def target():
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for n, x in state(1).items()}


def change(path, at=0):
  data = bytearray(path.read_bytes())
  data[at] ^= 1
  path.write_bytes(bytes(data))


def largest(folder):
  files = (p for p in pathlib.Path(folder).rglob("*") if p.is_file())
  return max(files, key=lambda path: path.stat().st_size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Run, Converted])
def test_any_bit_of_any_file_is_noticed_and_named(tmp_path, kind):
  saved = kind(tmp_path / "checkpoints")
  table = flip(saved, flips=60, seed=1)
  assert {outcome for counts in table.values() for outcome in counts} == {saved.expected}
  assert {"commit_success.txt", "checksums.json", "_CHECKPOINT_METADATA"} < table.keys()


@pytest.mark.parametrize("kind", [Run, Converted])
def test_every_large_array_has_chunks_of_its_name(tmp_path, kind):
  saved = kind(tmp_path / "checkpoints")
  sums = checksums.read(epath.Path(saved.folder))
  assert sums is not None
  found = {p.array for file in sums.files.values() for p in file.pieces} - {None}
  expected = weights() if kind is Converted else state(1)
  assert found == expected.keys() - {"params.small", "step"}


def rewritten(sums, change_piece):
  """Returns checksums of which every piece is changed."""
  return {
    name: file._replace(pieces=tuple(map(change_piece, file.pieces)))
    for name, file in sums.files.items()
  }


@pytest.mark.parametrize("wrong", ["{}/c/0", "unknown", ""])
def test_chunks_of_a_name_that_is_not_known_are_verified_all_the_same(tmp_path, wrong):
  saved = Converted(tmp_path / "checkpoints")
  folder = epath.Path(saved.folder)
  sums = checksums.read(folder)
  assert sums is not None
  # As an earlier version named them, and as nobody did.
  files = rewritten(
    sums, lambda p: p._replace(array=None if p.array is None else wrong.format(p.array))
  )
  (folder / manifest.FILE).write_text(manifest._text(files))
  reader = Checkpoints(saved.directory, keep=None)
  assert (reader.at(0).read("params.a") == weights()["params.a"]).all()
  name, piece = next(
    (name, p) for name, f in sums.files.items() for p in f.pieces if p.array == "params.a"
  )
  change(saved.folder / name, piece.offset + piece.length // 2)
  with pytest.raises(UserError, match=f"is damaged .{name}"):
    Checkpoints(saved.directory, keep=None).at(0).read("params.a")


def test_bytes_of_several_arrays_are_of_none(tmp_path):
  (tmp_path / "file").write_bytes(bytes(range(100)))
  chunks = [
    (10, 20, "a"),
    (10, 20, "b"),
    (40, 10, "a"),
    (45, 20, "b"),
    (70, 10, "c"),
    (70, 10, "c"),
  ]
  pieces = [manifest.Piece(offset, length, None, array) for offset, length, array in chunks]
  measured = manifest._measured(epath.Path(tmp_path / "file"), 100, pieces)
  assert [(p.offset, p.length, p.array) for p in measured.pieces] == [
    (0, 10, None),
    (10, 20, None),
    (30, 10, None),
    (40, 25, None),
    (65, 5, None),
    (70, 10, "c"),
    (80, 20, None),
  ]


def test_an_array_that_is_not_there_is_refused(tmp_path):
  saved = saved_in(tmp_path, steps=(1,))
  with pytest.raises(UserError, match=r"checkpoint_00000001 has no array params\.d\.$"):
    saved.at(1).read("params.d")
  (saved.path(1) / manifest.FILE).unlink()
  path = saved.path(1) / "metadata" / "metadata"
  said = json.loads(path.read_text())
  said["tensors"]["params.d"] = said["tensors"]["params.a"]
  del said["checksums"]
  path.write_text(json.dumps(said))
  wanted = target() | {"params.d": target()["params.a"]}
  for read in (
    lambda: Checkpoints(tmp_path, keep=None).at(1).restore(wanted, layout=LAYOUT),
    lambda: Checkpoints(tmp_path, keep=None).at(1).read("params.d"),
  ):
    with pytest.raises(UserError, match=r"is damaged \(array params\.d is missing\)"):
      read()


PLACES = ("metadata/metadata", "train_input/metadata", "state/_METADATA", "_CHECKPOINT_METADATA")


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, "checksums.json", "checksums/process_0.json"])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path, capsys, place, has_checksums):
  saved = saved_in(tmp_path, steps=(1, 2))
  (saved.path(2) / place).unlink()
  if not has_checksums:
    (saved.path(2) / manifest.FILE).unlink(missing_ok=True)
  os.mkfifo(saved.path(2) / place)
  found = saved.restore_latest_valid(target(), layout=LAYOUT)
  assert found is not None and found[0] == 1
  assert "00000002 is damaged" in capsys.readouterr().err
  assert verify.run([str(tmp_path)]) == 1


def test_a_pipe_in_an_older_checkpoint_ends_a_run_before_it_saves(tmp_path):
  saved = saved_in(tmp_path, steps=(1, 2))
  (saved.path(1) / "_CHECKPOINT_METADATA").unlink()
  os.mkfifo(saved.path(1) / "_CHECKPOINT_METADATA")
  with pytest.raises(UserError, match="00000001 cannot be read: _CHECKPOINT_METADATA is a pipe"):
    saved.restore_latest_valid(target(), layout=LAYOUT)


def test_an_edited_list_of_tensors_is_damage_and_not_another_experiment(tmp_path, capsys):
  saved = saved_in(tmp_path, steps=(1, 2))
  path = saved.path(2) / "metadata" / "metadata"
  said = json.loads(path.read_text())
  said["tensors"]["params.a"][0] = [3, 4]
  path.write_text(json.dumps(said))
  found = saved.restore_latest_valid(target(), layout=LAYOUT)
  assert found is not None and found[0] == 1
  assert "metadata/metadata" in capsys.readouterr().err


def test_without_checksums_a_checkpoint_loads_if_it_was_written_so(tmp_path, capsys):
  saved = saved_in(tmp_path, steps=(1, 2))
  (saved.path(2) / manifest.FILE).unlink()
  with pytest.raises(UserError, match=r"checksums\.json is missing"):
    saved.at(2).restore(target(), layout=LAYOUT)
  assert capsys.readouterr().err == ""
  path = saved.path(2) / "metadata" / "metadata"
  said = json.loads(path.read_text())
  del said["checksums"]
  path.write_text(json.dumps(said))
  capsys.readouterr()
  saved.at(2).restore(target(), layout=LAYOUT)
  assert capsys.readouterr().err.endswith("checkpoint_00000002 has no checksums: not verified.\n")
  assert verify.run([str(tmp_path)]) == 0
  assert "00000002 was written without checksums" in capsys.readouterr().out


def test_only_what_is_read_is_verified(tmp_path):
  saved = saved_in(tmp_path, steps=(1,))
  sums = checksums.read(saved.path(1))
  assert sums is not None
  for name, file in sums.files.items():
    for piece in file.pieces:
      if piece.array == "params.b":
        change(saved.path(1) / name, piece.offset)
  wanted = {"params.a": target()["params.a"]}
  saved.at(1).restore(wanted, layout=LAYOUT, unread=layout_conversion.anything)
  assert saved.at(1).read("params.a").shape == (300, 40)
  for read in (
    lambda: saved.at(1).restore(target(), layout=LAYOUT),
    lambda: saved.at(1).read("params.b"),
  ):
    with pytest.raises(UserError, match=r"is damaged \(state/.*, array params\.b\)"):
      read()


def test_an_older_checkpoint_goes_only_when_the_newer_one_is_whole(tmp_path, monkeypatch, capsys):
  remove = orbax_hooks.remove_after

  def after_damage(newest, folders):
    if folders:
      change(largest(newest))
    remove(newest, folders)

  monkeypatch.setattr(orbax_hooks, "remove_after", after_damage)
  saved = saved_in(tmp_path, steps=(1, 2), keep=1)
  assert saved.steps() == [1, 2]
  assert "checkpoint_00000002 is damaged" in capsys.readouterr().err
  found = saved.restore_latest_valid(target(), layout=LAYOUT)
  assert found is not None and found[0] == 1


def test_a_save_that_may_not_be_written_any_more_is_none(tmp_path):
  allowed = [True]

  def check_owner():
    if not allowed[0]:
      raise UserError("it belongs to another")

  told = pytest.raises(UserError, match="it belongs to another")
  with told, Checkpoints(tmp_path, keep=1, check_owner=check_owner) as saved:
    saved.save(1, state(1), layout=LAYOUT, train_input={})
    allowed[0] = False
    saved.wait()
    saved.save(2, state(2), layout=LAYOUT, train_input={})
  assert 2 not in saved.steps()


def test_the_command_says_of_each_checkpoint_whether_it_is_whole(tmp_path, capsys):
  saved = saved_in(tmp_path / "checkpoints", steps=(1, 2))
  assert verify.run([str(tmp_path), str(saved.path(1))]) == 0
  assert capsys.readouterr().out.count("is intact") == 3
  change(largest(saved.path(2)))
  assert verify.run([str(tmp_path)]) == 1
  first, second = capsys.readouterr().out.splitlines()
  assert "00000001 is intact" in first and "00000002 is damaged (state/" in second
  shutil.rmtree(saved.path(1))
  assert verify.run([str(saved.path(1))]) == 2
  assert "no checkpoint 1" in capsys.readouterr().err


def test_the_command_looks_at_every_folder(tmp_path, capsys):
  saved = saved_in(tmp_path / "run" / "checkpoints", steps=(1,))
  (tmp_path / "empty").mkdir()
  (tmp_path / "run" / "checkpoints" / "checkpoint_²").mkdir()
  folders = [str(tmp_path / name) for name in ("nowhere", "empty", "run")]
  assert verify.run(folders) == 2
  out, err = capsys.readouterr()
  assert "00000001 is intact" in out and "nowhere" in err and "empty" in err
  change(largest(saved.path(1)))
  assert verify.run(folders) == 1
  assert "00000001 is damaged" in capsys.readouterr().out


def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(tmp_path, monkeypatch, capsys):
  saved_in(tmp_path, steps=(1, 2))
  listed = Checkpoints.steps

  def steps(self):
    found = listed(self)
    shutil.rmtree(self.path(1), ignore_errors=True)
    return found

  monkeypatch.setattr(Checkpoints, "steps", steps)
  assert verify.run([str(tmp_path)]) == 0
  first, second = capsys.readouterr().out.splitlines()
  assert "00000001 was removed meanwhile" in first and "00000002 is intact" in second


def test_what_only_looks_like_a_checkpoint_prevents_nothing(tmp_path):
  saved_in(tmp_path, steps=(1,))
  for name in ("checkpoint_²", "checkpoint_1", "checkpoint_99999999999999999999"):
    (tmp_path / name).mkdir()
  (tmp_path / "checkpoint_00000009").touch()
  with Checkpoints(tmp_path, keep=None) as saved:
    found = saved.restore_latest_valid(target(), layout=LAYOUT)
    assert found is not None and found[0] == 1
    saved.save(2, state(2), layout=LAYOUT, train_input={})
  assert saved.steps() == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
  "place",
  [{"position": -1}, {"position": 2**50}, {"position": 1.5}, {"epoch": -1}, {"epoch": None}],
)
def test_a_place_that_the_data_do_not_have_is_refused(place):
  data = RandomTokens(vocab_size=8, seq_len=4, seed=0)
  state = {"epoch": 0, "position": 3, "fingerprint": data.fingerprint()}
  data.batches(2, state=state, updates=2).close()
  with pytest.raises(UserError, match="train_input of the checkpoint is damaged"):
    data.batches(2, state=state | place, updates=2)
