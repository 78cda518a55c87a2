# SPDX-License-Identifier: Apache-2.0
"""Processes on machines that are reached by SSH."""

import dataclasses
import re
import shlex

from paxlike.errors import UserError
from paxlike.launchers import process_file
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
NOTE={note}
SIGNAL={signal}

start() {{  # INDEX HOST
  {{
    echo "index=$1"
    echo "${{NOTE}}"
    echo "${{PREPARATION}}"
    echo "exec ${{COMMAND}}{index} < /dev/null"
  }} | "${{SSH[@]}}" "$2" bash -s 2>&1 | sed -u "s/^/$2: /"
}}

signal() {{  # NAME SECONDS
  for index in "${{!HOSTS[@]}}"; do
    "${{SSH[@]}}" "${{HOSTS[index]}}" bash -s &> /dev/null \\
      <<< "index=${{index}} name=$1 wait=$2; ${{SIGNAL}}" &
  done
}}

stopped='' running=''
stop() {{  # STATUS
  stopped=$1
  # A process may be about to start.
  [ -z "${{running}}" ] || signal TERM 60
}}

trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
{copy}for ((attempt = 0; ; attempt++)); do
  pids=() status=0 running=1
  [ -z "${{stopped}}" ] || exit "${{stopped}}"
  for index in "${{!HOSTS[@]}}"; do
    (trap '' INT TERM HUP; set -o pipefail; start "${{index}}" "${{HOSTS[index]}}") &
    pids+=($!)
  done
  for pid in "${{pids[@]}}"; do
    # A signal ends `wait` early, with a status above 128.
    while wait "${{pid}}"; one=$?; kill -0 "${{pid}}" 2> /dev/null; do :; done
    ((one > status)) && status=${{one}}
  done
  running=
  case "${{status}}" in {statuses}) ;; *) exit "${{status}}" ;; esac
  [ -z "${{stopped}}" ] && ((attempt < {max_restarts})) || exit "${{status}}"
  echo "a process ended with status ${{status}}: all are started again, and resume."
  signal KILL 0
  wait
  [ -n "${{stopped}}" ] || {{ sleep {pause} &> /dev/null & wait $!; }}
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
    file = process_file.path(job, "-${index}")
    return _SCRIPT.format(
      hosts=" ".join(map(shlex.quote, hosts)),
      options=f" {self.ssh_options}" if self.ssh_options else "",
      command=shlex.quote(job.command(*(group if several else ()))),
      index=" --host_idx=$1" if several else "",
      preparation=shlex.quote("\n".join([*change, *job.preparation()])),
      note=shlex.quote(process_file.note(file)),
      signal=shlex.quote(process_file.signal(file)),
      copy=self._copying(),
      statuses="|".join(map(str, (*RESTART, LOST))),
      max_restarts=job.restarts,
      pause=self.pause,
    )

  def _copying(self) -> str:
    if not self.copy:
      return ""
    there = shlex.quote(f"mkdir -p {quoted(self.directory)} && tar -C {quoted(self.directory)} -xz")
    send = f'tar -C {quoted(self.copy)} -cz . | "${{SSH[@]}}" "${{host}}" {there}'
    lines = [f'{send} || exit "${{stopped:-1}}"', '[ -z "${stopped}" ] || exit "${stopped}"']
    return f'for host in "${{HOSTS[@]}}"; do\n  {lines[0]}\n  {lines[1]}\ndone\n'

  def submission(self, file: str) -> list[str]:
    return ["bash", file]
