# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from etils import epath
from helpers.two_runs import two_runs

from paxlike.errors import RunError, UserError
from paxlike.processes import lease
from paxlike.processes.lease import Lease
from paxlike.processes.owner import Owner
from paxlike.telemetry.run_log import RunLog


@pytest.fixture
def folder(tmp_path, monkeypatch):
  monkeypatch.setattr(lease, "SILENCE", 0.6)
  monkeypatch.setattr(lease, "BEAT", 0.05)
  return epath.Path(tmp_path)


def claim(folder, number, **said):
  owner = Owner.here(folder)._replace(**said)
  (folder / f"owner_{number:08d}.json").write_text(json.dumps(owner._asdict()))
  return owner


def names(folder):
  return sorted(path.name for path in folder.iterdir())


def take(folder):
  owner = Lease(folder)
  owner.check()
  return owner


def test_one_of_many_that_start_together_owns_the_folder(folder):
  outcomes = []

  def attempt():
    try:
      outcomes.append(Lease(folder))
    except UserError as error:
      outcomes.append(str(error))

  threads = [threading.Thread(target=attempt) for _ in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  (owner,) = [one for one in outcomes if isinstance(one, Lease)]
  for said in outcomes:
    assert said is owner or f"is in use: process {os.getpid()} on " in said
  owner.release()


def test_who_ends_in_good_order_leaves_the_folder_to_the_next(folder):
  for number in (1, 2, 3, 4):
    take(folder).release()
    assert names(folder)[-1] == f"owner_{number:08d}.json"
  assert len(names(folder)) == 2
  before = {path: path.read_bytes() for path in folder.iterdir()}
  Lease(folder).release()  # It was refused before it wrote anything.
  assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_process_that_is_gone_owns_nothing(folder):
  gone = subprocess.Popen([sys.executable, "-c", ""])
  gone.wait()
  claim(folder, 1, pid=gone.pid)
  take(folder).release()
  # Another process has its number by now.
  claim(folder, 3, started="1")
  began = time.monotonic()
  take(folder).release()
  assert time.monotonic() - began < lease.SILENCE
  claim(folder, 5)
  with pytest.raises(UserError, match="is in use"):
    Lease(folder)


def test_an_owner_elsewhere_is_watched_and_replaced_by_one(folder, capsys):
  claim(folder, 1, host="elsewhere", machine="elsewhere", pid=7)
  test_one_of_many_that_start_together_owns_the_folder(folder)
  assert "was written by process 7 on elsewhere" in capsys.readouterr().err
  ends = threading.Event()

  def beat():
    number = 0
    while not ends.wait(0.05):
      number += 1
      claim(folder, 9, host="elsewhere", machine="elsewhere", pid=7, beat=number)

  thread = threading.Thread(target=beat)
  thread.start()
  try:
    time.sleep(0.2)
    with pytest.raises(UserError, match="is in use: process 7 on elsewhere"):
      Lease(folder)
  finally:
    ends.set()
    thread.join()


def test_an_owner_that_was_refused_while_it_was_watched_leaves_the_folder_free(folder, monkeypatch):
  monkeypatch.setattr(lease, "SILENCE", 4.0)
  claim(folder, 1, host="elsewhere", machine="elsewhere", pid=7)
  threading.Timer(0.3, (folder / "owner_00000001.json").unlink).start()
  take(folder).release()
  assert names(folder) == ["owner_00000001.json"]


def test_an_owner_whose_start_may_not_be_seen_is_watched(folder, monkeypatch, tmp_path):
  monkeypatch.setattr("paxlike.processes.owner._PROC", tmp_path / "hidepid")

  def refuse(pid, number):
    raise PermissionError

  monkeypatch.setattr(os, "kill", refuse)
  owner = take(folder)
  with pytest.raises(UserError, match=f"is in use: process {os.getpid()} on "):
    Lease(folder)
  owner.release()
  claim(folder, 7)  # It gives no sign.
  take(folder).release()

  def find_none(pid, number):
    raise ProcessLookupError

  monkeypatch.setattr(os, "kill", find_none)
  claim(folder, 9)
  began = time.monotonic()
  take(folder).release()
  assert time.monotonic() - began < lease.SILENCE


@pytest.mark.parametrize(
  "text", ["", "{", "[]", '{"host": 3}', "[" * 200_000, '{"host": [], "machine": 1}']
)
def test_a_damaged_file_is_an_owner_that_gives_no_sign(folder, text):
  (folder / "owner_00000001.json").write_text(text)
  (folder / "owner_².json").write_text(text)
  take(folder).release()
  assert names(folder)[-2] == "owner_00000002.json"


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(folder):
  os.mkfifo(folder / "owner_00000005.json")
  refused = pytest.raises(UserError, match=r"owner_00000005\.json is a pipe or a device")
  with refused, lease.owned(folder):
    pass
  assert names(folder) == ["owner_00000005.json"]


def test_a_copy_of_the_folder_of_a_live_run_is_nobodys(folder, tmp_path):
  owner = take(folder)
  (tmp_path / "copy").mkdir()
  copy = epath.Path(tmp_path / "copy")
  (copy / "owner_00000001.json").write_bytes((folder / "owner_00000001.json").read_bytes())
  take(copy).release()
  with pytest.raises(UserError, match="is in use"):
    Lease(folder)
  owner.release()


def test_a_folder_in_which_no_owner_can_be_written_has_none(folder, monkeypatch):
  def full(file):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  refused = pytest.raises(UserError, match="cannot be written: No space left")
  with refused, lease.owned(folder):
    pass
  assert names(folder) == []


def test_a_folder_that_is_gone_ends_the_run_in_one_line(tmp_path):
  folder = epath.Path(tmp_path / "run")
  folder.mkdir()
  owner = take(folder)
  folder.rmtree()
  owner._beaten = -1e9
  with pytest.raises(RunError, match=f"{folder} was moved or removed"):
    owner.check()
  owner.release()


def test_a_folder_in_the_place_of_the_one_that_was_moved_is_not_written_in(tmp_path):
  folder = epath.Path(tmp_path / "run")
  folder.mkdir()
  owner = take(folder)
  folder.rename(tmp_path / "moved")
  (folder / "checkpoints").mkdir(parents=True)
  for _ in range(2):
    with pytest.raises(RunError, match=f"{folder} is a new folder: the one that this run wrote in"):
      owner.check()
  owner.release()
  assert names(folder) == ["checkpoints"]


def test_who_finds_its_file_removed_ends_and_may_still_say_so(folder):
  ended = pytest.raises(RunError, match=r"owner_00000001\.json, .* was removed: this run ends")
  with ended, lease.owned(folder) as owner, RunLog(folder, check_owner=owner.check) as run_log:
    run_log.status("running", 3)
    (folder / "owner_00000001.json").unlink()
    run_log.status("running", 4)
  told = json.loads((folder / "status.json").read_text())
  assert (told["state"], told["step"]) == ("failed", 4)
  take(folder).release()


def test_who_finds_its_file_removed_and_another_owner_there_writes_no_more(folder):
  owner = take(folder)
  (folder / "owner_00000001.json").unlink()
  claim(folder, 1, host="elsewhere", machine="elsewhere", pid=7)
  before = (folder / "owner_00000001.json").read_bytes()
  owner._beaten = -1e9
  with pytest.raises(RunError, match="was taken over by process 7 on elsewhere"):
    owner.check()
  owner.release()
  assert (folder / "owner_00000001.json").read_bytes() == before


def test_others_see_whether_the_owner_lives_and_wait_for_no_sign(folder):
  observer = lease.Observer(folder)
  assert observer.is_alive() is None
  owner = take(folder)
  assert observer.is_alive()
  owner.release()
  assert not observer.is_alive()
  claim(folder, 2, started="1")  # As after a kill, in a container of its own.
  assert not observer.is_alive()
  claim(folder, 3, machine="elsewhere")
  for beat in range(3):
    time.sleep(0.4)
    claim(folder, 3, machine="elsewhere", beat=beat)
    assert observer.is_alive()
  time.sleep(0.7)
  assert not observer.is_alive()


def test_who_was_suspended_and_replaced_writes_no_more(folder):
  owner = take(folder)
  claim(folder, 2, host="elsewhere", pid=7)
  owner._beaten = -1e9  # As after a long sleep of all its threads.
  with pytest.raises(RunError, match="was taken over by process 7 on elsewhere"):
    owner.check()
  before = (folder / "owner_00000002.json").read_bytes()
  owner.release()
  assert (folder / "owner_00000002.json").read_bytes() == before


@pytest.mark.slow
def test_two_runs_in_one_folder_lose_nothing(tmp_path):
  assert two_runs(tmp_path, times=2, seed=0) == []
