# SPDX-License-Identifier: Apache-2.0
"""Slurm batch scripts."""

import dataclasses
import re

from paxlike.errors import UserError
from paxlike.launchers.job import RESTART, Job, option, quoted
from paxlike.launchers.target import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Target):
  """A batch script for `sbatch`, which requeues itself after a status from which a run resumes.

  Slurm itself queues the job again when a node fails or a job of higher priority needs the nodes.
  The processes find each other by Slurm's variables. With `grace` seconds left, they get SIGTERM,
  save a checkpoint and end.
  """

  suffix = ".sub"

  gpus_per_node: int = option(0, "GPUs to request on each node")
  tasks_per_node: int = option(1, "processes on each node, which share its GPUs evenly", least=1)
  cpus_per_task: int = option(0, "CPUs to request for each process")
  time: str = option("", "time limit, such as 4:00:00")
  grace: int = option(120, "seconds before the time limit that processes get SIGTERM", most=65535)
  partition: str = option("", "partition")
  account: str = option("", "account")
  output: str = option("%x-%j.out", "file for the output, with Slurm's patterns")
  container: str = option("", "container image, for Slurm with pyxis")
  mounts: str = option("", "mounts of the container: HOST:CONTAINER, separated by commas")
  directive: tuple[str, ...] = option((), "more #SBATCH lines, such as --exclusive")

  def text(self, job: Job) -> str:
    if self.mounts and not self.container:
      raise UserError("--mounts needs --container.")
    statuses = "|".join(map(str, RESTART))
    return "\n".join(
      [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {line}" for line in self._directives(job)),
        *job.preparation(),
        "set -u",
        "# If a process fails, paxlike ends the others, and its status says why.",
        f"srun --kill-on-bad-exit=0 --wait=600{self._options()} {job.command()}",
        "status=$?",
        'case "${status}" in',
        f"  {statuses})",
        f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_restarts} ]; then',
        '      scontrol requeue "${SLURM_JOB_ID}" &&',
        '        echo "paxlike ended with status ${status}: the job is queued again, and resumes."',
        "    else",
        f'      echo "paxlike ended with status ${{status}}, after {job.max_restarts} restarts."',
        "    fi",
        "    ;;",
        "esac",
        'exit "${status}"',
        "",
      ]
    )

  def _directives(self, job: Job) -> list[str]:
    optional = {
      "gpus-per-node": self.gpus_per_node,
      "cpus-per-task": self.cpus_per_task,
      "time": self.time,
      "partition": self.partition,
      "account": self.account,
    }
    lines = [
      f"--job-name={job.title}",
      f"--nodes={job.nodes}",
      f"--ntasks-per-node={self.tasks_per_node}",
      *(f"--{name}={value}" for name, value in optional.items() if value),
      f"--output={self.output}",
      "--open-mode=append",
      "--requeue",
      f"--signal=TERM@{self.grace}",
      *self.directive,
    ]
    for line in lines:
      if "\n" in line or "${" in line:
        raise UserError(f"{line!r}: Slurm expands no variables in a directive, which is one line.")
    return [re.sub(r"=(.*[\s#].*)$", r'="\1"', line) for line in lines]

  def _options(self) -> str:
    given = {"container-image": self.container, "container-mounts": self.mounts}
    if self.cpus_per_task:  # srun does not take this from the job.
      given["cpus-per-task"] = str(self.cpus_per_task)
    return "".join(f" --{name}={quoted(value)}" for name, value in given.items() if value)

  def submission(self, file: str) -> list[str]:
    return ["sbatch", file]
