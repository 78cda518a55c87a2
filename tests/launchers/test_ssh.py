# SPDX-License-Identifier: Apache-2.0
"""Jobs of `paxlike-launch ssh`, on a real sshd."""

import pathlib
import signal
import subprocess
import sys

import pytest
from helpers import program, ssh_server
from helpers.launched import newest, until
from helpers.sources import REPOSITORY

from paxlike.launchers import main

needs_ssh = pytest.mark.skipif(
  not ssh_server.HAS_SSH, reason="there is no sshd, or it cannot be started"
)
pytestmark = pytest.mark.slow
RUN = (
  *program.TINY,
  "--fdl.CHECKPOINT_EVERY_N_STEPS=20",
  "--fdl.EVAL_INTERVAL_STEPS=0",
  "--fdl.LR_COS_DECAY_END=100",
)


def script(tmp_path: pathlib.Path, options: str, *flags: str) -> pathlib.Path:
  """Saves the script of a job on two machines, both of which are this one."""
  file = tmp_path / "job.sh"
  launch = ["ssh", "--hosts=127.0.0.1,localhost", f"--ssh_options={options}", "--pause=1"]
  launch += [f"--program={sys.executable} -m paxlike.main", f"--directory={REPOSITORY}"]
  launch += ["--env=JAX_PLATFORMS=cpu", f"--name=test {tmp_path.name}", f"--to={file}"]
  assert main.run([*launch, *RUN, *flags]) == 0
  return file


def processes(folder: pathlib.Path) -> list[int]:
  """Returns the ids of the processes that train in a folder."""
  pattern = f"paxlike.main .*job_log_dir={folder} "
  found = subprocess.run(["pgrep", "-f", pattern], stdout=subprocess.PIPE, text=True, check=False)
  return [int(line) for line in found.stdout.split()]


@needs_ssh
def test_a_job_goes_on_after_one_of_its_processes_is_killed(tmp_path):
  run, whole = tmp_path / "run", tmp_path / "whole"
  with ssh_server.running(tmp_path) as options:
    file = script(tmp_path, options, "--fdl.MAX_STEPS=${STEPS:-300}", f"--job_log_dir={run}")
    job = subprocess.Popen(["bash", file], stdout=subprocess.PIPE, text=True)
    until(lambda: newest(run) >= 20, seconds=480, what="there is no checkpoint")
    subprocess.run(["kill", "-KILL", str(processes(run)[-1])], check=True)
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    assert "all are started again" in out and "localhost: resuming" not in out
    assert "127.0.0.1: resuming from checkpoint" in out
    file = script(tmp_path, options, "--fdl.MAX_STEPS=300", f"--job_log_dir={whole}")
    subprocess.run(["bash", file], check=True, timeout=300, stdout=subprocess.PIPE)
  assert dict(program.curve(run)) == dict(program.curve(whole))


@needs_ssh
def test_a_stopped_job_saves_and_a_wrong_one_is_not_restarted(tmp_path):
  run = tmp_path / "run"
  with ssh_server.running(tmp_path) as options:
    file = script(tmp_path, options, "--fdl.MAX_STEPS=100000", f"--job_log_dir={run}")
    job = subprocess.Popen(["bash", file], stdout=subprocess.PIPE, text=True)
    until(lambda: newest(run) >= 20, seconds=480, what="there is no checkpoint")
    job.send_signal(signal.SIGTERM)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 143, out
    assert newest(run) == program.curve(run)[-1][0] and not processes(run)
    text = file.read_text().replace("--fdl_config=Gpt3_52k", "--fdl_config=Gpt3_52")
    file.write_text(text)
    done = subprocess.run(["bash", file], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2 and done.stdout.count("no experiment Gpt3_52.") == 2, done.stdout
