# SPDX-License-Identifier: Apache-2.0
"""What `--mode=check` saves in the folder of a run, it removes again."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time

import jax.numpy as jnp
import pytest
from helpers import warm_python
from helpers.program import finish, run
from helpers.sources import REPOSITORY

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.checks import storage
from paxlike.layers.stack_layout import Layout


def test_a_folder_that_cannot_be_written_is_a_mistake(capsys, tmp_path):
  (tmp_path / "file").write_text("")
  assert run("--mode=check", f"--job_log_dir={tmp_path / 'file' / 'run'}") == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1
  assert f"--job_log_dir={tmp_path / 'file' / 'run'}" in err


def test_a_store_that_cannot_be_reached_is_a_mistake(capsys):
  assert run("--mode=check", "--job_log_dir=s3://bucket/run") == 2
  out, err = capsys.readouterr()
  assert out == "" and err.count("\n") == 1 and "s3://bucket/run" in err


@pytest.fixture
def interruptible():
  """Shells start what runs in the background with SIGINT ignored."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_was_saved_is_removed_when_interrupted(tmp_path, number):
  path = tmp_path / "new" / "run"
  with pytest.raises(KeyboardInterrupt), storage.folder(str(path)) as own:
    assert own is not None
    with Checkpoints(own, keep=None) as saved:
      saved.save(0, {"w": jnp.ones(2**22)}, layout=Layout(scanned=False, repeats=0), train_input={})
      while not list(own.iterdir()):  # It is saved in the background.
        pass
      os.kill(os.getpid(), number)
      time.sleep(10)
  assert list(tmp_path.iterdir()) == []
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_still_written_while_a_folder_is_removed_is_removed_too(tmp_path):
  """As Orbax's threads do where the disk was full."""
  with storage.folder(str(tmp_path / "run")) as own:
    assert own is not None

    own.mkdir()

    def write(folder=own / "state"):
      for n in range(30):
        time.sleep(0.01)
        with contextlib.suppress(OSError):
          folder.mkdir(parents=True, exist_ok=True)
          (folder / str(n)).write_text("")

    writer = threading.Thread(target=write)
    writer.start()
  writer.join()
  assert list(tmp_path.iterdir()) == []


_FOLDERS = """
import sys
import jax
index, address, *paths = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, int(index))
from paxlike.checks import storage
from paxlike.errors import UserError
for path in paths:
  try:
    with storage.folder(path.format(index)) as folder:
      print("folder", folder)
  except UserError as error:
    print("mistake", error)
"""


@pytest.mark.slow
def test_two_processes_share_a_folder_and_leave_nothing(tmp_path):
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  paths = (f"{tmp_path}/node{{}}/run", f"{tmp_path}/new/run")
  script = tmp_path / "script.py"
  script.write_text(_FOLDERS)
  processes = [
    subprocess.Popen(
      [warm_python.program(), script, str(index), address, *paths],
      env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(2)
  ]
  said = []
  for status, out, err in [finish(process) for process in processes]:
    assert status == 0, err
    assert "is not the same folder in all processes: process 1 does not see" in out
    said += [line for line in out.splitlines() if line.startswith("folder")]
  assert len(said) == 2 and said[0] == said[1]
  assert said[0].startswith(f"folder {tmp_path}/new/run/check_")
  assert list(tmp_path.iterdir()) == [script]
