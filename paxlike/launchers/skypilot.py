# SPDX-License-Identifier: Apache-2.0
"""Tasks of SkyPilot (https://docs.skypilot.co), which finds machines on any cloud."""

import dataclasses
import re
from typing import Any

from paxlike.errors import UserError
from paxlike.launchers.job import RESTART, Job, option
from paxlike.launchers.manifest import to_yaml
from paxlike.launchers.target import Devices, Target

_PORT = 8476


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyPilot(Target):
  """A task of SkyPilot; `sky jobs launch` also restarts it after a preemption."""

  suffix = ".yaml"

  accelerators: str = option("", "devices of each machine, such as H100:8")
  cloud: str = option("", "cloud; default: the cheapest that has them")
  spot: bool = option(False, "use spot machines")
  directory: str = option("", "local folder that becomes the working directory")
  install: str = option("", "shell commands that install paxlike on a new machine")

  def text(self, job: Job) -> str:
    if not self.accelerators:
      raise UserError("sky needs --accelerators=NAME:COUNT.")
    if job.max_restarts:
      raise UserError(
        f"--max_restarts={job.max_restarts}: SkyPilot has no such limit: leave it out, or give 0"
        " for restarts after preemptions alone."
      )
    several = job.nodes > 1
    group = (
      f'--server_addr=$(head -n1 <<< "${{SKYPILOT_NODE_IPS}}"):{_PORT}',
      "--num_hosts=${SKYPILOT_NUM_NODES}",
      "--host_idx=${SKYPILOT_NODE_RANK}",
    )
    command = " \\\n  ".join([f"exec {job.command()}", *(group if several else ())])
    resources: dict[str, Any] = {"accelerators": self.accelerators}
    resources |= {"cloud": self.cloud} if self.cloud else {}
    resources |= {"use_spot": True} if self.spot else {}
    if job.restarts:
      resources["job_recovery"] = {"recover_on_exit_codes": list(RESTART)}
    task: dict[str, Any] = {"name": job.title, "num_nodes": job.nodes, "resources": resources}
    task |= {"workdir": self.directory} if self.directory else {}
    task |= {"setup": f"{self.install}\n"} if self.install else {}
    task["run"] = "\n".join([*job.preparation(), command, ""])
    return to_yaml(task)

  def devices(self) -> Devices | None:
    count = re.fullmatch(r"(?!tpu-)[\w-]+:(\d+)", self.accelerators)
    return Devices(int(count[1]), f"--accelerators={self.accelerators}") if count else None

  def submission(self, file: str) -> list[str]:
    return ["sky", "jobs", "launch", file]
