# SPDX-License-Identifier: Apache-2.0
"""Jobs of `paxlike-launch slurm`, on a real cluster of two nodes where Slurm is installed."""

import contextlib
import pathlib
import subprocess
import sys

import pytest
from helpers import program, slurm_cluster
from helpers.launched import newest, until

from paxlike.launchers import main

needs_slurm = pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing())
STEPS = 400
RUN = (
  *program.TINY,
  "--fdl.CHECKPOINT_EVERY_N_STEPS=20",
  "--fdl.EVAL_INTERVAL_STEPS=0",
  f"--fdl.MAX_STEPS={STEPS}",
  "--fdl.LR_COS_DECAY_END=400",
)


def made(capsys: pytest.CaptureFixture, *flags: str) -> list[str]:
  """Returns the lines of a script."""
  assert main.run(["slurm", *RUN, "--job_log_dir=/run", *flags]) == 0
  return capsys.readouterr().out.splitlines()


def test_a_job_that_saves_nothing_is_not_queued_again(capsys):
  lines = made(capsys)
  assert "#SBATCH --requeue" in lines and any("scontrol requeue" in line for line in lines)
  lines = made(capsys, "--enable_checkpoint_saving=false")
  assert "#SBATCH --no-requeue" in lines and not any("scontrol" in line for line in lines)
  assert lines[-1] == 'exit "${status}"'


def test_directives_are_as_they_were_given(capsys):
  given = '--comment="a b"'
  lines = made(capsys, f"--directive={given}", "--output=a b.out")
  assert f"#SBATCH {given}" in lines and '#SBATCH --output="a b.out"' in lines


def test_exported_variables_replace_those_of_the_image(capsys):
  setup = "export XLA_FLAGS=--x\n[ -z x ] || export B=2"
  lines = made(capsys, "--container=image", "--env=A=1", f"--setup={setup}", "--mounts=/a:/b,./c")
  (srun,) = (line for line in lines if line.startswith("srun "))
  assert "--container-env=A,XLA_FLAGS,B" in srun and "--container-mounts=/a:/b,./c" in srun


def test_what_paxlike_says_has_the_name_of_the_command(capsys):
  assert main.run(["slurm", "--fdl_config=GPT5B", "--job_log_dir=/run"]) == 0
  assert capsys.readouterr().err == ("paxlike-launch: --fdl_config=GPT5B of Pax is Pile5B here\n")


def is_completed(cluster: slurm_cluster.Cluster, job: str) -> bool:
  """Returns whether a job is complete; lets one start that Slurm would start in two minutes."""
  state, _ = cluster.state(job)
  if state == "PENDING":
    with contextlib.suppress(subprocess.CalledProcessError):  # It has started by now.
      cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now")
  return state == "COMPLETED"


@needs_slurm
@pytest.mark.slow
def test_a_job_survives_the_failure_of_a_node(tmp_path):
  """Slurm queues it again, and the losses are those of a job that nothing befell."""
  run, whole = tmp_path / "run", tmp_path / "whole"
  with slurm_cluster.running() as cluster:
    launch = [
      *(sys.executable, "-m", "paxlike.launchers.main", "slurm", "--submit", "--nodes=2"),
      *(f"--program={sys.executable} -m paxlike.main", f"--output={tmp_path}/job.out"),
      "--env=JAX_PLATFORMS=cpu",
    ]

    def submit(folder: pathlib.Path, *more: str) -> str:
      command = [*launch, *more, *RUN, f"--job_log_dir={folder}"]
      done = subprocess.run(
        command,
        env=cluster.environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
      )
      return done.stdout.split()[-1]

    job = submit(run)
    until(lambda: newest(run) >= 20, seconds=480, what="there is no checkpoint")
    cluster.fail_node(slurm_cluster.NODES[1], program="paxlike.main")
    until(lambda: cluster.state(job)[1] == 1, seconds=120, what="it was not queued again")
    assert newest(run) < STEPS
    cluster.start_node(slurm_cluster.NODES[1])
    until(lambda: is_completed(cluster, job), seconds=300, what="it did not complete")
    job = submit(whole)
    until(lambda: is_completed(cluster, job), seconds=300, what="it did not complete")
  losses = dict(program.curve(run))
  assert losses == dict(program.curve(whole)) and len(losses) == STEPS
