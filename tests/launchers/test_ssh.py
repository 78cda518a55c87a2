# SPDX-License-Identifier: Apache-2.0
"""Jobs of `paxlike-launch ssh`, on a real sshd and with a program in the place of `ssh`."""

import os
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
  # ssh does not pass on this process's variables.
  for name, value in os.environ.items():
    if name.startswith(("JAX_", "XLA_", "NPROC", "PAXLIKE_CACHE")):
      launch.append(f"--env={name}={value}")
  launch += [f"--name=test {tmp_path.name}", f"--to={file}"]
  assert main.run([*launch, *RUN, *flags]) == 0
  return file


def processes(folder: pathlib.Path) -> list[int]:
  """Returns the ids of the processes that train in a folder."""
  pattern = f"paxlike.main .*job_log_dir={folder} "
  found = subprocess.run(["pgrep", "-f", pattern], stdout=subprocess.PIPE, text=True, check=False)
  return [int(line) for line in found.stdout.split()]


@needs_ssh
@pytest.mark.slow
def test_a_job_goes_on_after_one_of_its_processes_is_killed(tmp_path):
  run = tmp_path / "run"
  with ssh_server.running(tmp_path) as options:
    file = script(tmp_path, options, "--fdl.MAX_STEPS=200", f"--job_log_dir={run}")
    job = subprocess.Popen(["bash", file], stdout=subprocess.PIPE, text=True)
    until(lambda: newest(run) >= 20, seconds=480, what="there is no checkpoint")
    subprocess.run(["kill", "-KILL", str(processes(run)[-1])], check=True)
    out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, out
    assert "all are started again" in out and "localhost: resuming" not in out
    assert "127.0.0.1: resuming from checkpoint" in out
  assert [step for step, _ in program.curve(run)] == list(range(1, 201))


@needs_ssh
@pytest.mark.slow
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


# Runs the command here; copying takes until a file is there.
SSH = """\
#!/usr/bin/env bash
while [ "$1" = -o ]; do shift 2; done
case "$*" in *tar*) touch copying; until [ -e stop ]; do sleep 0.1; done ;; esac
# A machine of its own: neither signals nor that they are ignored come from here.
exec env --default-signal=INT,TERM,HUP setsid --wait bash -c "${*:2}"
"""
# Ends as a process that was lost, or by a signal.
LOST = """\
#!/usr/bin/env bash
echo run >> runs
[ -e lost ] && exit 75
trap 'exit 143' TERM
touch started
while :; do sleep 0.1; done
"""


@pytest.mark.parametrize(
  ("moment", "sent", "status"),
  [
    ("copying", signal.SIGTERM, 143),
    ("copying", signal.SIGINT, 130),
    ("paused", signal.SIGTERM, 143),
    ("paused", signal.SIGINT, 130),
    ("started", signal.SIGTERM, 143),
    ("started", signal.SIGINT, 143),  # That of the processes.
  ],
)
def test_a_script_stops_whatever_it_does(moment, sent, status, tmp_path):
  """A terminal sends Ctrl-C to all of a process group."""
  for name, text in (("ssh", SSH), ("paxlike", LOST)):
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(0o755)
  (tmp_path / ("lost" if moment == "paused" else "stays")).touch()
  flags = ["ssh", "--hosts=a,b", "--pause=60", f"--program={tmp_path}/paxlike"]
  flags += [f"--directory={tmp_path}", *[f"--copy={tmp_path}"][: moment == "copying"]]
  assert (
    main.run([*flags, f"--to={tmp_path}/job.sh", *program.TINY, f"--job_log_dir={tmp_path}"]) == 0
  )
  job = subprocess.Popen(
    ["env", "--default-signal=INT", "bash", "job.sh"],
    cwd=tmp_path,
    env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    stdout=subprocess.PIPE,
    text=True,
    start_new_session=True,
  )
  if moment == "paused":
    assert job.stdout is not None and "all are started again" in job.stdout.readline()
  else:
    until((tmp_path / moment).exists, seconds=20, what=f"it is not {moment}")
  os.killpg(job.pid, sent)
  (tmp_path / "stop").touch()
  job.communicate(timeout=30)
  assert job.returncode == status
  runs = (tmp_path / "runs").read_text().count("run") if (tmp_path / "runs").exists() else 0
  assert runs == (0 if moment == "copying" else 2)
