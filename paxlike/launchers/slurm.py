# SPDX-License-Identifier: Apache-2.0
"""Slurm batch scripts."""

import dataclasses
import re

from paxlike.errors import UserError
from paxlike.launchers.job import RESTART, Job, has_variable, option, quoted, variable
from paxlike.launchers.target import Devices, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slurm(Target):
  """A batch script for `sbatch`, which requeues itself after a status from which a run resumes.

  Slurm itself queues the job again when a node fails or a job of higher priority needs the nodes.
  Arguments of the script are more flags of `paxlike`.
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
  container: str = option(
    "",
    "container image (needs pyxis). With ${NAME}, the container is used only if NAME is set when"
    " the job runs",
  )
  mounts: str = option("", "mounts of the container: HOST:CONTAINER, separated by commas")
  sbatch: str = option(
    "",
    "options that `bash FILE` passes to sbatch; may use shell variables, e.g. --nodes=${NODES:-8}",
  )
  directive: tuple[str, ...] = option((), "more #SBATCH lines, such as --exclusive")

  def text(self, job: Job) -> str:
    if self.mounts and not self.container:
      raise UserError("--mounts needs --container.")
    if self.container:
      job.check_log_dir("--container")
    return "\n".join(
      [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {line}" for line in self._directives(job)),
        *job.preparation(),
        *self._submission(),
        *self._mounting(),
        "set -u",
        "# If a process fails, paxlike ends the others, and its status says why.",
        f"srun --kill-on-bad-exit=0 --wait=600{self._options(job)} {job.command()} \\",
        '  "$@"',
        "status=$?",
        *self._restart(job),
        'exit "${status}"',
        "",
      ]
    )

  def _restart(self, job: Job) -> list[str]:
    """Returns the lines that queue the job again, if its status says that this helps."""
    if not job.restarts:
      return []
    return [
      'case "${status}" in',
      f"  {'|'.join(map(str, RESTART))})",
      f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.restarts} ]; then',
      '      scontrol requeue "${SLURM_JOB_ID}" &&',
      '        echo "paxlike ended with status ${status}: the job is queued again, and resumes."',
      "    else",
      f'      echo "paxlike ended with status ${{status}}, after {job.restarts} restarts."',
      "    fi",
      "    ;;",
      "esac",
    ]

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
      "--requeue" if job.restarts else "--no-requeue",
      f"--signal=TERM@{self.grace}",
    ]
    for line in lines:
      if '"' in line:
        raise UserError(f"{line}: Slurm takes no quote in it; --directive passes a line as it is.")
    lines = [re.sub(r"=(.*[\s#].*)$", r'="\1"', line) for line in lines]
    for line in (*lines, *self.directive):
      if "\n" in line or "${" in line:
        raise UserError(f"{line!r}: Slurm expands no variables in a directive, which is one line.")
    return [*lines, *self.directive]

  def _submission(self) -> list[str]:
    """Returns the lines by which the script, run outside of a job, submits itself."""
    if not self.sbatch:
      return []
    return [
      "# `bash FILE` submits this file with these options.",
      'if [ -z "${SLURM_JOB_ID:-}" ]; then',
      f'  exec sbatch {self.sbatch} "$0" "$@"',
      "fi",
    ]

  def _mounting(self) -> list[str]:
    """Returns the lines that keep the paths among mounts that are variables."""
    if not has_variable(self.mounts):
      return []
    mounts = re.split(r",(?![^{}]*\})", self.mounts)
    return [
      "# Buckets and variables that are not set are not mounted.",
      "MOUNTS=",
      f"PATHS=({' '.join(map(quoted, mounts))})",
      'for mount in "${PATHS[@]}"; do',
      '  case "${mount}" in /*) MOUNTS="${MOUNTS:+${MOUNTS},}${mount}" ;; esac',
      "done",
    ]

  def _options(self, job: Job) -> str:
    """Returns the options of srun."""
    # srun does not take this from the job.
    own = f" --cpus-per-task={self.cpus_per_task}" if self.cpus_per_task else ""
    if not self.container:
      return own
    options = [f"--container-image={quoted(self.container)}"]
    if has_variable(self.mounts):
      options.append('${MOUNTS:+--container-mounts="${MOUNTS}"}')
    elif self.mounts:
      options.append(f"--container-mounts={quoted(self.mounts)}")
    if names := job.exported():
      # Without it, values that the image has for these variables prevail.
      options.append(f"--container-env={','.join(names)}")
    name = variable(self.container)
    return f"{own} ${{{name}:+{' '.join(options)}}}" if name else f"{own} {' '.join(options)}"

  def devices(self) -> Devices | None:
    if not self.gpus_per_node:
      return None
    flag = f"--gpus_per_node={self.gpus_per_node}"
    return Devices(self.gpus_per_node, flag, processes=self.tasks_per_node)

  def submission(self, file: str) -> list[str]:
    return ["bash" if self.sbatch else "sbatch", file]
