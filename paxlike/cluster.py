# SPDX-License-Identifier: Apache-2.0
"""What a cluster's environment says of the processes of a job."""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from paxlike.errors import UserError

_PORTS = range(61440, 65536)  # Of those that systems give to no service; a job takes one by number.
_PORT = 8476
# Which of a node's GPUs a process may open, in the order in which their drivers read them.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class Group(NamedTuple):
  """The processes of a job, as one of them sees them.

  Attributes:
    address: HOST:PORT of process 0.
    count: Of processes.
    index: Of this process.
    devices: Which of the GPUs that are visible here this process has; None: all.
  """

  address: str
  count: int
  index: int
  devices: tuple[int, ...] | None = None


def num_gpus() -> int:
  """Returns how many NVIDIA GPUs this machine has, without asking their driver."""
  return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def own_gpus(
  environ: Mapping[str, str], num_gpus: Callable[[], int] = num_gpus
) -> tuple[int, ...] | None:
  """Returns which of the visible GPUs this process takes; None: all of them.

  If fewer are visible than the job has on the node, the scheduler has split them already. Else the
  processes of the node split them evenly.

  Raises:
    UserError: They cannot be split evenly.
  """
  rank, size = _local(environ)
  there = num_gpus()
  of_job = int(environ.get("SLURM_GPUS_ON_NODE", there))
  named = next((environ[name] for name in _VISIBLE if name in environ), None)
  visible = there if named is None else len([name for name in named.split(",") if name.strip()])
  if size == 1 or visible < of_job or visible == 0:
    return None
  if visible % size:
    raise UserError(
      f"{size} processes on this node cannot share its {visible} GPUs evenly: start one for each"
      " GPU or one for all, or give each its own by CUDA_VISIBLE_DEVICES."
    )
  share = visible // size
  return tuple(range(rank * share, (rank + 1) * share))


def _local(environ: Mapping[str, str]) -> tuple[int, int]:
  """Returns the number of this process among those of its node, and how many they are."""
  if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return int(environ[names[0]]), int(environ[names[1]])
  if "SLURM_LOCALID" not in environ or "SLURM_STEP_TASKS_PER_NODE" not in environ:
    return 0, 1
  # Such as 8(x3),4: eight tasks on each of three nodes, four on the fourth.
  sizes: list[int] = []
  for part in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
    size, _, times = part.rstrip(")").partition("(x")
    sizes += [int(size)] * int(times or 1)
  return int(environ["SLURM_LOCALID"]), sizes[int(environ.get("SLURM_NODEID", 0))]


def found(environ: Mapping[str, str], num_gpus: Callable[[], int] = num_gpus) -> Group | None:
  """Returns the group that an environment tells of; None if it is of a single process.

  Raises:
    UserError: It says one thing and not another.
  """
  # What mpirun starts within a job of Slurm has the environment of both.
  for read in (_kubernetes, _open_mpi, _slurm):
    group = read(environ)
    if group is not None and group.count > 1:
      # Pods have GPUs of their own.
      own = None if read is _kubernetes else own_gpus(environ, num_gpus)
      return group._replace(devices=own)
    if group is not None:
      return None
  return None


def num_tpu_processes() -> int:
  """Returns how many processes the TPUs of this machine are part of, as JAX's detectors find out.

  GKE tells by the environment, Compute Engine (queued resources) by its metadata server, which is
  asked only where JAX finds that this is a TPU's virtual machine.

  Raises:
    UserError: The server does not answer.
  """
  from jax._src.clusters import cloud_tpu_cluster as detectors

  try:
    for detector in (detectors.GkeTpuCluster, detectors.GceTpuCluster):
      if detector.is_env_present():
        return detector.get_process_count()
  except OSError as error:
    raise UserError(
      f"this machine has TPUs, but the metadata server does not say of which slice: {error}. Give"
      " --server_addr=HOST:PORT --num_hosts=N --host_idx=I, or set TPU_SKIP_MDS_QUERY=1 if it is"
      " the only one."
    ) from None
  return 1


def _kubernetes(environ: Mapping[str, str]) -> Group | None:
  """Reads what a manifest gives each pod; the index is that of an indexed job's pod, or given."""
  host = environ.get("JAX_COORDINATOR_ADDRESS") or environ.get("JAX_COORDINATOR_IP")
  count = environ.get("JAX_NUM_PROCESSES") or environ.get("NNODES")
  if host is None or count is None:
    return None
  names = ("JAX_PROCESS_ID", "NODE_RANK", "JOB_COMPLETION_INDEX")
  index = next((environ[name] for name in names if name in environ), None)
  if index is None:
    raise UserError(
      f"the environment says that process 0 of {count} is {host}, but not which one this is: set"
      " JAX_PROCESS_ID, or run an indexed job (JOB_COMPLETION_INDEX)."
    )
  port = environ.get("JAX_COORDINATOR_PORT", str(_PORT))
  return Group(host if ":" in host else f"{host}:{port}", int(count), int(index))


def _slurm(environ: Mapping[str, str]) -> Group | None:
  """Reads what `srun` gives each task; a shell of `salloc` is none."""
  names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
  if any(name not in environ for name in names):
    return None
  job, nodes, count, index = (environ[name] for name in names)
  return Group(f"{first_host(nodes)}:{_port(int(job))}", int(count), int(index))


def _open_mpi(environ: Mapping[str, str]) -> Group | None:
  """Reads what `mpirun` of Open MPI gives each process."""
  names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
  if any(name not in environ for name in names):
    return None
  count, index = (environ[name] for name in names)
  launcher = environ.get("OMPI_MCA_orte_hnp_uri", "")
  host = re.search(r"tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]]", launcher)
  if count == "1":
    return None
  if host is None:
    raise UserError(
      f"Open MPI says that this is process {index} of {count}, but not where process 0 is"
      f" (OMPI_MCA_orte_hnp_uri={launcher}): give --server_addr=HOST:PORT --num_hosts={count}"
      f" --host_idx={index}."
    )
  port = _port(int(launcher.split(".")[0]) >> 12)
  return Group(f"{host[1] or host[2]}:{port}", int(count), int(index))


def _port(job: int) -> int:
  return _PORTS[job % len(_PORTS)]


def first_host(nodes: str) -> str:
  """Returns the first of Slurm's list of hosts, such as `node[007-012,20],other`."""
  match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*)", nodes)
  assert match is not None
  return f"{match[1]}{match[2] or ''}{match[3]}"
