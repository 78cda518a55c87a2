# SPDX-License-Identifier: Apache-2.0
"""A real Slurm cluster of two nodes on this machine: slurmctld, and a slurmd for each node.

Debian has it in `slurm-wlm`. The daemons need root, and a munge daemon of their own.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo")
# Names that are addresses: a step finds its coordinator by the name of its first node.
NODES = ("127.0.0.1", "127.0.0.2")
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
NodeName={nodes[0]} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName={nodes[1]} NodeAddr=127.0.0.1 NodeHostname={host} Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
  """Returns why there can be no cluster; "" if there can."""
  absent = [name for name in PROGRAMS if shutil.which(name) is None]
  return f"there is no {absent[0]}" if absent else "" if os.geteuid() == 0 else "needs root"


class Cluster:
  """A running cluster."""

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self._slurmd: dict[str, subprocess.Popen] = {}
    self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}

  def command(self, *words: str) -> str:
    """Runs one of Slurm's commands; returns what it prints."""
    return subprocess.run(
      words, env=self.environment, check=True, text=True, stdout=subprocess.PIPE, timeout=60
    ).stdout

  def start_node(self, node: str):
    """Starts the daemon of a node."""
    with (self._folder / f"slurmd.{node}.out").open("a") as log:
      command = [shutil.which("slurmd") or "", "-D", "-N", node]
      self._slurmd[node] = subprocess.Popen(
        command, env=self.environment, stdout=log, stderr=log, start_new_session=True
      )

  def fail_node(self, node: str, *, program: str):
    """Kills the daemon of a node, and the processes of a program that it has started."""
    self._slurmd[node].kill()
    self._slurmd[node].wait()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):
        words = (entry / "cmdline").read_text().split("\0")
        variables = (entry / "environ").read_text().split("\0")
        its = f"SLURMD_NODENAME={node}" in variables
        if its and ("slurmstepd" in words[0] or any(program in word for word in words)):
          os.kill(int(entry.name), signal.SIGKILL)

  def state(self, job: str) -> tuple[str, int]:
    """Returns the state of a job and how often it was restarted."""
    shown = self.command("scontrol", "show", "job", job)
    state, restarts = re.search(r"JobState=(\w+)", shown), re.search(r"Restarts=(\d+)", shown)
    assert state and restarts, shown
    return state[1], int(restarts[1])


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
  """Context of a cluster. Its sockets need short paths, which folders of tests are not."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="slurm-"))
  for name in ("munge", "state", "spool"):
    (folder / name).mkdir(mode=0o700)
  ports = []
  for _ in range(3):
    with socket.socket() as probe:
      probe.bind(("127.0.0.1", 0))
      ports.append(probe.getsockname()[1])
  values = {"folder": folder, "nodes": NODES, "host": socket.gethostname(), "ports": ports}
  (folder / "slurm.conf").write_text(_CONFIGURATION.format(**values))
  key = folder / "munge" / "key"
  key.write_bytes(os.urandom(1024))
  key.chmod(0o400)
  cluster, started = Cluster(folder), []
  munge = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
  files = [f"--{name}={folder}/munge/{file}" for name, file in munge.items()]
  try:
    for command in (
      ["munged", "-F", "--force", f"--key-file={key}", *files],
      ["slurmctld", "-D", "-i"],
    ):
      with (folder / f"{command[0]}.out").open("w") as log:
        command[0] = shutil.which(command[0]) or ""
        started.append(subprocess.Popen(command, env=cluster.environment, stdout=log, stderr=log))
      time.sleep(1)
    for node in NODES:
      cluster.start_node(node)
    end = time.monotonic() + 60
    while set(cluster.command("sinfo", "-h", "-o", "%t").split()) != {"idle"}:
      assert time.monotonic() < end, "the nodes do not start"
      time.sleep(0.5)
    yield cluster
  finally:
    for process in (*cluster._slurmd.values(), *reversed(started)):
      process.terminate()
    for process in (*cluster._slurmd.values(), *started):
      try:
        process.wait(timeout=15)
      except subprocess.TimeoutExpired:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
