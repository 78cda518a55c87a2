# SPDX-License-Identifier: Apache-2.0
"""What is known of a run by the files in its folder."""

import json
import os
import socket
import time

import pytest
from etils import epath

from paxlike.errors import UserError
from paxlike.processes import lease, owner_files
from paxlike.processes.owner import Owner
from paxlike.telemetry import run_status


def write(folder: epath.Path, **said):
  """Writes the status of a run that was running on another machine."""
  told = {"state": "running", "step": 3, "num_steps": 9, "host": "node17", "pid": 1}
  (folder / "status.json").write_text(json.dumps(told | said))


@pytest.fixture
def folder(tmp_path):
  return epath.Path(tmp_path)


def test_a_run_goes_on_as_long_as_the_owner_of_its_folder_lives(folder):
  assert run_status.read(folder) is None and run_status.state(folder) is None
  write(folder)
  assert run_status.read(folder) == ("lost", 3, 9)
  owner = lease.Lease(folder)
  owner.check()
  assert run_status.state(folder) == "running"
  owner.release()
  assert run_status.state(folder) == "lost"


@pytest.mark.parametrize(
  ("age", "state"), [(0, "running"), (-60, "running"), (60, "running"), (3600, "lost")]
)
def test_a_run_that_only_its_heartbeat_can_show_is_lost_after_minutes_without(folder, age, state):
  """Of another machine or an earlier boot, each time someone looks."""
  write(folder)
  assert owner_files.create(folder, 1, Owner("node17", "node17 another-boot", 7, "1"))
  written = time.time() - age
  os.utime(folder / "owner_00000001.json", (written, written))
  for _ in range(2):
    assert run_status.state(folder) == state
  # Who polls compares heartbeats, whatever the clocks say.
  assert run_status.is_running(folder, lease.Observer(folder))


@pytest.mark.parametrize("pid", ["1e999", "NaN", "[]", "null", "true", "-1", "1.5", "1" + "0" * 99])
def test_a_damaged_process_in_status_is_none(folder, pid):
  text = f'{{"state": "running", "host": {json.dumps(socket.gethostname())}, "pid": {pid}}}'
  (folder / "status.json").write_text(text)
  assert run_status.read(folder) == ("lost", None, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"state": ', "3"])
def test_a_damaged_status_is_named(folder, capsys, text):
  (folder / "status.json").write_text(text)
  with pytest.raises(UserError, match=r"status\.json is damaged: "):
    run_status.read(folder)
  assert not run_status.is_running(folder, lease.Observer(folder))
  assert capsys.readouterr().err.endswith(": skipped\n")


def test_a_pipe_in_the_place_of_status_is_not_waited_for(folder):
  os.mkfifo(folder / "status.json")
  with pytest.raises(UserError, match=r"status\.json is a pipe or a device"):
    run_status.is_running(folder, lease.Observer(folder))
