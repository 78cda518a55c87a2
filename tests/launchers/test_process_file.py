# SPDX-License-Identifier: Apache-2.0
"""Processes are found by what they noted, and no other is."""

import pathlib
import signal
import subprocess

import pytest
from helpers.launched import until

from paxlike.launchers import process_file
from paxlike.launchers.job import Job


def stop(file: pathlib.Path):
  command = f"name=TERM wait=0; {process_file.signal(str(file))}"
  subprocess.run(["bash", "-c", command], check=False, capture_output=True)


def test_only_the_process_that_noted_itself_gets_the_signal(tmp_path):
  file = tmp_path / "a.pid"
  process = subprocess.Popen(["bash", "-c", f"{process_file.note(str(file))}\nexec sleep 60"])
  until(lambda: file.exists() and file.read_text(), seconds=20, what="it notes nothing")
  number, start = file.read_text().split()
  assert int(number) == process.pid
  file.write_text(f"{number} {int(start) - 1}\n")  # An earlier process with this number.
  stop(file)
  assert process.poll() is None
  file.write_text(f"{number} {start}\n")
  stop(file)
  assert process.wait(20) == -signal.SIGTERM
  stop(file)
  stop(tmp_path / "missing")


def test_a_file_that_cannot_be_written_ends_the_process(tmp_path):
  command = f"{process_file.note(f'{tmp_path}/no/a.pid')}\necho it goes on"
  done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
  assert done.returncode == 1 and not done.stdout and "no/a.pid" in done.stderr


@pytest.mark.parametrize("flags", [("--job_log_dir=/b",), ("--job_log_dir", "/b"), ()])
def test_files_are_of_one_folder(flags):
  paths = {process_file.path(Job(flags=given)) for given in (("--job_log_dir=/a",), flags)}
  assert len(paths) == 2
