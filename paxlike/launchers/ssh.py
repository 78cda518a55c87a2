# SPDX-License-Identifier: Apache-2.0
"""Processes on machines that are reached by SSH."""

import dataclasses
import re
import shlex

from paxlike.errors import UserError
from paxlike.launchers.job import LOST, RESTART, Job, option, quoted
from paxlike.launchers.target import Target

_SCRIPT = """\
#!/usr/bin/env bash
# Runs a process on each of HOSTS, and restarts all if one is lost. Ctrl-C or SIGTERM stops them all
# with a checkpoint.
set -u
HOSTS=({hosts})
SSH=(ssh -o BatchMode=yes -o ServerAliveInterval=10 -o ServerAliveCountMax=6{options})
COMMAND={command}
PREPARATION={preparation}
PID=/tmp/paxlike-{name}

start() {{  # INDEX HOST
  {{
    echo "echo \\$\\$ > ${{PID}}-$1.pid"
    echo "${{PREPARATION}}"
    echo "exec ${{COMMAND}}{index} < /dev/null"
  }} | "${{SSH[@]}}" "$2" bash -s 2>&1 | sed -u "s/^/$2: /"
}}

signal() {{  # NAME
  for index in "${{!HOSTS[@]}}"; do
    "${{SSH[@]}}" "${{HOSTS[index]}}" "kill -$1 \\$(cat ${{PID}}-${{index}}.pid)" 2> /dev/null &
  done
}}

stopped=
trap 'stopped=1; signal TERM' INT TERM HUP
{copy}for ((attempt = 0; ; attempt++)); do
  pids=() status=0
  for index in "${{!HOSTS[@]}}"; do
    (trap '' INT TERM HUP; set -o pipefail; start "${{index}}" "${{HOSTS[index]}}") &
    pids+=($!)
  done
  for pid in "${{pids[@]}}"; do
    # A signal ends `wait` early, with a status above 128.
    while wait "${{pid}}"; one=$?; kill -0 "${{pid}}" 2> /dev/null; do :; done
    ((one > status)) && status=${{one}}
  done
  case "${{status}}" in {statuses}) ;; *) exit "${{status}}" ;; esac
  [ -z "${{stopped}}" ] && ((attempt < {max_restarts})) || exit "${{status}}"
  echo "a process ended with status ${{status}}: all are started again, and resume."
  signal KILL
  sleep {pause}
done
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ssh(Target):
  """A script that starts a process on each of several machines by SSH, and restarts lost jobs."""

  suffix = ".sh"

  hosts: str = option("", "machines, separated by commas; the first coordinates the others")
  port: int = option(8476, "port of the coordinator on the first machine", least=1, most=65535)
  address: str = option("", "address of the first machine for the others; default: its name")
  directory: str = option("", "working directory on the machines")
  copy: str = option("", "local folder that is copied there first")
  ssh_options: str = option("", "options of ssh, such as '-i KEY -p 2222'")
  pause: int = option(10, "seconds before a restart")

  def text(self, job: Job) -> str:
    hosts = [host for host in self.hosts.split(",") if host]
    if not hosts:
      raise UserError("ssh needs --hosts=NAME,NAME,...")
    for host in hosts:
      if not re.fullmatch(r"[\w.@:\[\]-]+", host) or host.startswith("-"):
        raise UserError(f"--hosts: {host} is not the name of a machine.")
    if job.nodes not in (1, len(hosts)):
      raise UserError(f"--nodes={job.nodes}, but --hosts has {len(hosts)} machines.")
    if self.copy and not self.directory:
      raise UserError("--copy needs --directory, the folder on the machines that it is copied to.")
    first = self.address or hosts[0].rpartition("@")[2]
    several = len(hosts) > 1
    group = [f"--server_addr={first}:{self.port}", f"--num_hosts={len(hosts)}"]
    change = [f"cd {quoted(self.directory)} || exit 1"] if self.directory else []
    return _SCRIPT.format(
      hosts=" ".join(map(shlex.quote, hosts)),
      options=f" {self.ssh_options}" if self.ssh_options else "",
      command=shlex.quote(job.command(*(group if several else ()))),
      index=" --host_idx=$1" if several else "",
      preparation=shlex.quote("\n".join([*change, *job.preparation()])),
      name=job.title,
      copy=self._copying(),
      statuses="|".join(map(str, (*RESTART, LOST))),
      max_restarts=job.max_restarts,
      pause=self.pause,
    )

  def _copying(self) -> str:
    if not self.copy:
      return ""
    there = shlex.quote(f"mkdir -p {quoted(self.directory)} && tar -C {quoted(self.directory)} -xz")
    send = f'tar -C {quoted(self.copy)} -cz . | "${{SSH[@]}}" "${{host}}" {there} || exit 1'
    return f'for host in "${{HOSTS[@]}}"; do\n  {send}\ndone\n'

  def submission(self, file: str) -> list[str]:
    return ["bash", file]
