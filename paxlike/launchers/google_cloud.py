# SPDX-License-Identifier: Apache-2.0
"""TPUs of Google Cloud: queued resources of Compute Engine, and XPK on GKE."""

import dataclasses
import re
import shlex

from paxlike.errors import UserError
from paxlike.launchers import process_file
from paxlike.launchers.job import LOST, RESTART, Job, option, quoted
from paxlike.launchers.manifest import without_references
from paxlike.launchers.target import Devices, Target

# Largest packets of Google's network, for traffic between slices.
_MTU = 8896
# For traffic between slices: repeats lost packets after 5 ms (200 ms by default), keeps the
# congestion window of connections that were idle, and has larger buffers.
_TUNE_NETWORK = (
  "sudo sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0 net.ipv4.tcp_no_metrics_save=1"
  " net.core.optmem_max=131072 net.core.somaxconn=4096 net.ipv4.tcp_max_syn_backlog=4096",
  """route="$(ip route show default | sed 's/ rto_min.*//;1q')\"""",
  "sudo ip route change ${route} rto_min 5ms",
)
# Types of slices whose number counts cores, and the cores of a JAX device.
_CORES = {"v2": 1, "v3": 1, "v4": 2, "v5p": 2}

_QUEUED = """\
#!/usr/bin/env bash
# Requests TPUs unless it has, waits for them, and runs a process on each of their machines.
# Ctrl-C, SIGTERM or SIGHUP stops all processes with a checkpoint. The TPUs are kept.
set -eu
WHERE=({where})
SLICES=({slices})
SIGNAL={signal}

queued() {{  # COMMAND FLAG...
  gcloud compute tpus queued-resources "$1" {name} "${{WHERE[@]}}" "${{@:2}}"
}}

everywhere() {{  # COMMAND
  local pids=() status=0 one
  set -m  # In process groups of their own, which Ctrl-C does not reach.
  for slice in "${{SLICES[@]}}"; do
    gcloud compute tpus tpu-vm ssh "${{slice}}" "${{WHERE[@]}}" --worker=all --command="$1" \\
      < /dev/null &
    pids+=($!)
  done
  set +m
  for pid in "${{pids[@]}}"; do
    # A signal ends `wait` early, with a status above 128.
    while wait "${{pid}}" && one=0 || one=$?; kill -0 "${{pid}}" 2> /dev/null; do :; done
    if ((one > status)); then status=${{one}}; fi
  done
  return "${{status}}"
}}

stopped='' running=''
stop() {{  # STATUS
  stopped=$1
  echo "stopping${{running:+: all processes save a checkpoint and end}}." >&2
  if [ -n "${{running}}" ]; then
    # A process may be about to start.
    everywhere "name=TERM wait=60; ${{SIGNAL}}" > /dev/null 2>&1 &
  fi
}}

say_what_is_left() {{
  local state
  if state="$(queued describe --format='value(state.state)' 2> /dev/null)"; then
    case "${{state}}" in
      FAILED | SUSPENDED | SUSPENDING)
        echo "the request {name} is ${{state}}. Delete it, then run this script again to resume:" ;;
      *) echo "the TPUs of {name} are kept (${{state}}); this script resumes. To delete them:" ;;
    esac
    echo "  gcloud compute tpus queued-resources delete {name} ${{WHERE[*]}} --force"
  fi >&2
}}

pause() {{
  sleep {pause} &> /dev/null & wait $! || true
}}

wait_for_tpus() {{
  local state
  until state="$(queued describe --format='value(state.state)')" && [ "${{state}}" = ACTIVE ]; do
    case "${{state}}" in FAILED | SUSPENDED) exit 1 ;; esac
    [ -z "${{stopped}}" ] || exit "${{stopped}}"
    pause
  done
  [ -z "${{stopped}}" ] || exit "${{stopped}}"
}}

trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
trap say_what_is_left EXIT
{network}
queued describe > /dev/null 2>&1 || queued create {request}
wait_for_tpus
{prepare}for ((attempt = 0; ; attempt++)); do
  running=1
  [ -z "${{stopped}}" ] || exit "${{stopped}}"
  everywhere {run} && exit 0 || status=$?
  case "${{status}}" in {statuses}) ;; *) break ;; esac
  [ -z "${{stopped}}" ] && ((attempt < {max_restarts})) || break
  running=
  echo "a process ended with status ${{status}}: all are started again, and resume."
  pause
  wait_for_tpus
  everywhere "name=KILL wait=0; ${{SIGNAL}}" &> /dev/null || true
done
exit "${{status}}"
"""


def _network(name: str, project: str) -> str:
  """Returns commands that create a network with large packets, unless it exists."""
  gcloud = f"gcloud compute --project={project}" if project else "gcloud compute"
  return f"""\
if ! {gcloud} networks describe {name} > /dev/null 2>&1; then
  {gcloud} networks create {name} --mtu={_MTU} --subnet-mode=auto --bgp-routing-mode=regional
  {gcloud} firewall-rules create {name}-internal --network={name} --allow=tcp,udp,icmp \\
    --source-ranges=10.128.0.0/9
fi"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GoogleCloud(Target):
  """A script for a zone of Google Cloud."""

  suffix = ".sh"

  zone: str = option("", "zone")
  project: str = option("", "project; default: gcloud's")

  @property
  def _place(self) -> list[str]:
    return [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]

  def _require(self, target: str, *names: str):
    """Raises UserError if one of these flags is not given."""
    for name in names:
      if not getattr(self, name):
        raise UserError(f"{target} needs --{name}.")

  def submission(self, file: str) -> list[str]:
    return ["bash", file]


def _slice(flag: str, name: str) -> Devices | None:
  """Returns the devices of a type of slice, such as v5litepod-256."""
  found = re.fullmatch(r"(v\w+)-(\d+)", name)
  if found is None:
    return None
  return Devices(int(found[2]) // _CORES.get(found[1], 1), f"--{flag}={name}", are_slice=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueuedResources(_GoogleCloud):
  """A script that requests TPU slices of Compute Engine, and runs a process on all their machines.

  Each of `nodes` is a slice. The processes find each other by the metadata server. The machines are
  kept, and the script ends by saying so: run it again to resume, or delete the queued resource.
  """

  accelerator_type: str = option("", "type of a slice, such as v5litepod-256")
  runtime_version: str = option("", "software of the machines, such as v2-alpha-tpuv5-lite")
  network: str = option("", "network")
  create_network: bool = option(False, "create that network first, with large packets")
  spot: bool = option(False, "request spot capacity")
  reserved: bool = option(False, "request reserved capacity")
  install: str = option("", "shell commands that install paxlike on each machine")
  pause: int = option(30, "seconds between looks at the request")

  def text(self, job: Job) -> str:
    self._require("gce", "accelerator_type", "runtime_version", "zone")
    if self.create_network and not self.network:
      raise UserError("--create_network: name it with --network=NAME.")
    one = job.nodes == 1
    slices = [job.title] if one else [f"{job.title}-{index}" for index in range(job.nodes)]
    several = [f"--node-count={job.nodes}", f"--node-prefix={job.title}"]
    request = [
      *(f"--accelerator-type={self.accelerator_type}", f"--runtime-version={self.runtime_version}"),
      *([f"--node-id={job.title}"] if one else several),
      *([f"--network={self.network}"] if self.network else []),
      *(f"--{kind}" for kind in ("spot", "reserved") if getattr(self, kind)),
    ]
    prepare = "\n".join([*(() if one else _TUNE_NETWORK), *self.install.splitlines()])
    file = process_file.path(job)
    run = [process_file.note(file), *job.preparation(), f"exec {job.command()}"]
    return _QUEUED.format(
      where=" ".join(map(shlex.quote, self._place)),
      slices=" ".join(slices),
      network=_network(self.network, self.project) if self.create_network else "",
      name=job.title,
      request=" ".join(map(shlex.quote, request)),
      pause=self.pause,
      prepare=f"everywhere {shlex.quote(prepare)}\n" if prepare else "",
      max_restarts=job.restarts,
      signal=shlex.quote(process_file.signal(file)),
      run=shlex.quote("\n".join(run)),
      statuses="|".join(map(str, (*RESTART, LOST))),
    )

  def devices(self) -> Devices | None:
    return _slice("accelerator_type", self.accelerator_type)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Xpk(_GoogleCloud):
  """A script of XPK commands, for slices of TPUs or machines with GPUs on GKE."""

  cluster: str = option("", "cluster")
  tpu_type: str = option("", "type of a slice, such as v5litepod-256")
  device_type: str = option("", "type of a machine with GPUs, such as h100-80gb-8")
  image: str = option("", "container image with paxlike")
  priority: str = option("", "priority, such as medium")
  create_cluster: bool = option(False, "create the cluster first, in a network with large packets")
  capacity: str = option("on-demand", "its capacity: on-demand, spot or reservation=NAME")
  grace: int = option(120, "seconds between SIGTERM and SIGKILL")

  def text(self, job: Job) -> str:
    self._require("xpk", "cluster", "zone", "image")
    if bool(self.tpu_type) == bool(self.device_type):
      raise UserError("xpk needs --tpu_type or --device_type, one of them.")
    job.check_log_dir("--image")
    where = [f"--cluster={self.cluster}", *self._place]
    devices = [f"--tpu-type={self.tpu_type}", f"--num-slices={job.nodes}"]
    if self.device_type:
      devices = [f"--device-type={self.device_type}", f"--num-nodes={job.nodes}"]
    create = []
    if self.create_cluster:
      network = f"{self.cluster}-network"
      arguments = shlex.quote(f"--network={network} --subnetwork={network}")
      flags = [*where, *devices, f"--{self.capacity}", f"--custom-cluster-arguments={arguments}"]
      create = [
        _network(network, self.project),
        f"xpk cluster create {' '.join(flags)}",
      ]
    options = [
      f"--workload={job.title}",
      *devices,
      f"--docker-image={self.image}",
      f"--max-restarts={job.restarts}",
      f"--restart-on-exit-codes={','.join(map(str, RESTART))}",
      f"--termination-grace-period-seconds={self.grace}",
      *([f"--priority={self.priority}"] if self.priority else []),
    ]
    return "\n".join(
      [
        "#!/usr/bin/env bash",
        "set -eu",
        *create,
        f"xpk workload create {' '.join(map(quoted, [*where, *options]))} \\",
        f"  --command={shlex.quote(without_references(self._command(job)))}",
        "",
      ]
    )

  def _command(self, job: Job) -> str:
    """Returns the shell's command of a machine: one line, as XPK indents only the first in YAML."""
    tune = _TUNE_NETWORK if self.tpu_type and job.nodes > 1 else ()
    setup = [line.rstrip("; ") for line in job.preparation()]
    lines = [*(line.replace("sudo ", "") for line in tune), *setup]
    command = "; ".join([*filter(None, lines), f"exec {job.command(separator=' ')}"])
    if len(command.splitlines()) > 1 or len(job.setup.strip().splitlines()) > 1:
      raise UserError(
        "XPK takes a command of one line, and --setup, --env or a flag has several: join those of"
        " --setup by ';', or put them into the image."
      )
    if re.search(r"(^|\s)#", job.setup):
      raise UserError("--setup: XPK takes a command of one line, which a comment would end.")
    return command

  def devices(self) -> Devices | None:
    if self.tpu_type:
      return _slice("tpu_type", self.tpu_type)
    count = re.search(r"-(\d+)$", self.device_type)
    return Devices(int(count[1]), f"--device_type={self.device_type}") if count else None
