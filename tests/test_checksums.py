# SPDX-License-Identifier: Apache-2.0
import gc
import json
import pathlib
import shutil

import jax
import pytest
from flip_bits import LAYOUT, flip, state

from paxlike import checksums, committing, relayout, verify
from paxlike.checkpoint import Checkpoints
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


def test_any_bit_of_any_file_is_noticed_and_named(tmp_path):
  table = flip(tmp_path, flips=60, seed=1)
  assert {outcome for counts in table.values() for outcome in counts} == {"fell back"}
  assert {"commit_success.txt", "checksums.json", "_CHECKPOINT_METADATA"} < table.keys()


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
  (saved.path(2) / checksums.FILE).unlink()
  with pytest.raises(UserError, match=r"checksums\.json is missing"):
    saved.restore(2, target(), layout=LAYOUT)
  path = saved.path(2) / "metadata" / "metadata"
  said = json.loads(path.read_text())
  del said["checksums"]
  path.write_text(json.dumps(said))
  capsys.readouterr()
  saved.restore(2, target(), layout=LAYOUT)
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
  saved.restore(1, wanted, layout=LAYOUT, unread=relayout.anything)
  assert saved.read(1, "params.a").shape == (300, 40)
  for read in (
    lambda: saved.restore(1, target(), layout=LAYOUT),
    lambda: saved.read(1, "params.b"),
  ):
    with pytest.raises(UserError, match=r"is damaged \(state/.*, array params\.b\)"):
      read()


def test_an_older_checkpoint_goes_only_when_the_newer_one_is_whole(tmp_path, monkeypatch, capsys):
  replace = committing.replace

  def after_damage(surplus, newest):
    if surplus:
      change(largest(newest))
    replace(surplus, newest)

  monkeypatch.setattr(committing, "replace", after_damage)
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
  assert capsys.readouterr().out.count("is whole") == 3
  change(largest(saved.path(2)))
  assert verify.run([str(tmp_path)]) == 1
  first, second = capsys.readouterr().out.splitlines()
  assert "00000001 is whole" in first and "00000002 is damaged (state/" in second
  shutil.rmtree(saved.path(1))
  assert verify.run([str(saved.path(1))]) == 2
  assert "no checkpoint 1" in capsys.readouterr().err


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
