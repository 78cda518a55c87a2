# SPDX-License-Identifier: Apache-2.0
"""What a cluster's environment says of the processes of a job."""

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from paxlike.errors import UserError

_PORTS = range(61440, 65536)  # Of those that systems give to no service; a job takes one by number.
_PORT = 8476
# What GKE sets for several slices; JAX takes an empty one for one slice.
_SLICES = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
_NO_GPU = ("", "-1", "nodevfiles", "none", "void")  # Where CUDA stops reading such a list.
# Which of a node's GPUs a process may open; the first variable that is set counts.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_GIVE = "Where no cluster tells, give --server_addr=HOST:PORT --num_hosts=N --host_idx=I."


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
  """Returns how many NVIDIA GPUs this machine shows; 0 where it has none or another driver's."""
  return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def own_gpus(
  environ: Mapping[str, str], num_gpus: Callable[[], int] = num_gpus
) -> tuple[int, ...] | None:
  """Returns which of the visible GPUs this process takes; None: all of them.

  If the processes of the node could each have as many GPUs as this one sees, the scheduler has
  split the GPUs already. Else the processes split them evenly.

  Raises:
    UserError: They cannot be split evenly.
  """
  rank, size = local(environ)
  if size == 1 or environ.get("JAX_PLATFORMS") == "cpu":
    return None
  slurm = environ.get("SLURM_GPUS_ON_NODE", "")
  # Where nothing says how many GPUs there are (AMD, WSL), there is one for each process.
  of_job = int(slurm) if slurm.isdecimal() else num_gpus() or size
  listed = next((environ[name] for name in _VISIBLE if name in environ), None)
  names = [] if listed is None else [name.strip() for name in listed.split(",")]
  names = list(itertools.takewhile(lambda name: name.lower() not in _NO_GPU, names))
  if len(names) == 1:
    return None
  if any(name.startswith("MIG-") for name in names):
    raise UserError(
      f"{size} processes on this node see {len(names)} MIG instances, but CUDA shows a process only"
      " the first: give each its own by CUDA_VISIBLE_DEVICES=MIG-..."
    )
  visible = min(num_gpus() or of_job, of_job) if listed is None else len(names)
  if visible * size <= of_job:
    return None
  if visible % size:
    raise UserError(
      f"{size} processes on this node cannot share its {visible} GPUs evenly: start one for each"
      " GPU or one for all, or give each its own by CUDA_VISIBLE_DEVICES."
    )
  share = visible // size
  return tuple(range(rank * share, (rank + 1) * share))


def local(environ: Mapping[str, str]) -> tuple[int, int]:
  """Returns the number of this process among those of its node, and how many they are.

  Raises:
    UserError: Slurm says no number of processes for this node.
  """
  names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
  if all(name in environ for name in names):
    return int(environ[names[0]]), int(environ[names[1]])
  if "SLURM_LOCALID" not in environ or "SLURM_STEP_TASKS_PER_NODE" not in environ:
    return 0, 1
  # Such as 8(x3),4: eight tasks on each of three nodes, four on the fourth.
  tasks, node = environ["SLURM_STEP_TASKS_PER_NODE"], int(environ.get("SLURM_NODEID", 0))
  parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
  sizes = [int(size) for size, times in parts for _ in range(int(times or 1))]
  if node >= len(sizes):
    raise UserError(
      f"SLURM_STEP_TASKS_PER_NODE={tasks} does not say how many tasks node SLURM_NODEID={node} has."
    )
  return int(environ["SLURM_LOCALID"]), sizes[node]


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
    UserError: The server does not answer, or not as JAX expects.
  """
  from jax._src.clusters import cloud_tpu_cluster as detectors

  try:
    with gke_answers():
      for detector in (detectors.GkeTpuCluster, detectors.GceTpuCluster):
        if detector.is_env_present():
          return detector.get_process_count()
  except (OSError, ValueError) as error:
    reason = (str(error) or repr(error)).splitlines()[0][:300].rstrip(".")
    raise UserError(
      f"this machine has TPUs, but the metadata server does not say of which slice: {reason}. Give"
      " --server_addr=HOST:PORT --num_hosts=N --host_idx=I, or set TPU_SKIP_MDS_QUERY=1 if it is"
      " the only one."
    ) from None
  return 1


def found_by_jax() -> Group:
  """Returns the group of a slice of TPUs, or several, as JAX's detectors find it.

  Raises:
    UserError: They do not.
  """
  from jax._src import clusters

  unset = (None, None, None, None, None)
  with gke_answers():
    try:
      found = clusters.ClusterEnv.auto_detect_unset_distributed_params(*unset, 300)
    except (ValueError, RuntimeError, OSError) as error:
      raise UserError(f"could not find the other processes: {error} {_GIVE}") from error
  address, count, index, devices = found
  if address is None or count is None or index is None:
    raise UserError(f"could not find the other processes. {_GIVE}")
  return Group(address, count, index, None if devices is None else tuple(devices))


@contextlib.contextmanager
def gke_answers() -> Iterator[None]:
  """Context of asking JAX about the TPUs of GKE: the environment says all that is known of slices.

  For what it does not say JAX would ask a metadata server, which pods need not reach.
  """
  from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster

  unset = [name for name in _SLICES if name not in os.environ]
  unset = unset if GkeTpuCluster.is_env_present() else []
  os.environ.update(dict.fromkeys(unset, ""))
  try:
    yield
  finally:
    for name in unset:
      del os.environ[name]


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
