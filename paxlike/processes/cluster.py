# SPDX-License-Identifier: Apache-2.0
"""Detection of a job's processes from the environment: Slurm, Open MPI, Kubernetes, TPUs."""

import contextlib
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from paxlike.errors import UserError

_PORTS = range(61440, 65536)  # A job's coordinator port is chosen by job number.
_PORT = 8476
# Set by GKE for several slices; JAX interprets empty values as a single slice.
_SLICES = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")
_NO_GPU = ("", "-1", "nodevfiles", "none", "void")  # CUDA ignores the rest of a list after these.
# Which of a node's GPUs are visible to a process; the first variable that is set is used.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

_GIVE = "Outside a known cluster, set --server_addr=HOST:PORT --num_hosts=N --host_idx=I."


class ProcessGroup(NamedTuple):
  """The processes of a job, and this one's place.

  Attributes:
    address: HOST:PORT of process 0, the coordinator.
    count: Number of processes.
    index: Index of this process.
    devices: Indices of the visible GPUs that this process uses; None: all.
  """

  address: str
  count: int
  index: int
  devices: tuple[int, ...] | None = None


def num_gpus() -> int:
  """Returns the number of NVIDIA GPUs in /dev; 0 without the NVIDIA driver."""
  return len(list(pathlib.Path("/dev").glob("nvidia[0-9]*")))


def own_gpus(
  environ: Mapping[str, str], num_gpus: Callable[[], int] = num_gpus
) -> tuple[int, ...] | None:
  """Returns which of the visible GPUs this process uses; None: all of them.

  If the node has enough GPUs for each process to have as many as this one sees, the scheduler has
  already split them. Otherwise the processes split them evenly.

  Raises:
    UserError: They cannot be split evenly.
  """
  rank, size = local_rank_and_size(environ)
  if size == 1 or environ.get("JAX_PLATFORMS") == "cpu":
    return None
  slurm = environ.get("SLURM_GPUS_ON_NODE", "")
  # If the number of GPUs is unknown (AMD, WSL), assume one per process.
  of_job = int(slurm) if slurm.isdecimal() else num_gpus() or size
  listed = next((environ[name] for name in _VISIBLE if name in environ), None)
  names = [] if listed is None else [name.strip() for name in listed.split(",")]
  names = list(itertools.takewhile(lambda name: name.lower() not in _NO_GPU, names))
  if len(names) == 1:
    return None
  if any(name.startswith("MIG-") for name in names):
    raise UserError(
      f"{size} processes on this node see {len(names)} MIG instances, but CUDA gives a process only"
      " the first: set CUDA_VISIBLE_DEVICES=MIG-... for each process."
    )
  visible = min(num_gpus() or of_job, of_job) if listed is None else len(names)
  if visible * size <= of_job:
    return None
  if visible % size:
    raise UserError(
      f"{size} processes on this node cannot share its {visible} GPUs evenly: start one process per"
      " GPU or per node, or set CUDA_VISIBLE_DEVICES for each."
    )
  share = visible // size
  return tuple(range(rank * share, (rank + 1) * share))


def local_rank_and_size(environ: Mapping[str, str]) -> tuple[int, int]:
  """Returns (local rank, local size): this process among those of its node.

  Raises:
    UserError: Slurm's environment has no number of processes for this node.
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
      f"SLURM_STEP_TASKS_PER_NODE={tasks} has no number of tasks for node SLURM_NODEID={node}."
    )
  return int(environ["SLURM_LOCALID"]), sizes[node]


def detect(
  environ: Mapping[str, str], num_gpus: Callable[[], int] = num_gpus
) -> ProcessGroup | None:
  """Returns the group that an environment describes; None for a single process.

  Raises:
    UserError: The environment is incomplete.
  """
  # A process that mpirun starts within a Slurm job has the environment of both.
  for read in (_kubernetes, _open_mpi, _slurm):
    group = read(environ)
    if group is not None and group.count > 1:
      # Each pod has its own GPUs.
      own = None if read is _kubernetes else own_gpus(environ, num_gpus)
      return group._replace(devices=own)
    if group is not None:
      return None
  return None


def num_tpu_processes() -> int:
  """Returns the number of processes of this machine's TPU slice, as JAX's detectors report it.

  GKE has it in the environment, Compute Engine (queued resources) in its metadata server, which is
  queried only on a TPU virtual machine.

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
      f"this machine has TPUs, but its slice cannot be read from the metadata server: {reason}. Set"
      " --server_addr=HOST:PORT --num_hosts=N --host_idx=I, or TPU_SKIP_MDS_QUERY=1 if it is the"
      " only machine."
    ) from None
  return 1


def found_by_jax() -> ProcessGroup:
  """Returns the group of one or several TPU slices, as JAX's detectors find it.

  Raises:
    UserError: They find none.
  """
  from jax._src import clusters

  unset = (None, None, None, None, None)
  with gke_answers():
    try:
      found = clusters.ClusterEnv.auto_detect_unset_distributed_params(*unset, 300)
    except (ValueError, RuntimeError, OSError) as error:
      raise UserError(f"could not detect the other processes: {error} {_GIVE}") from error
  address, count, index, devices = found
  if address is None or count is None or index is None:
    raise UserError(f"could not detect the other processes. {_GIVE}")
  return ProcessGroup(address, count, index, None if devices is None else tuple(devices))


@contextlib.contextmanager
def gke_answers() -> Iterator[None]:
  """Context of JAX's detection on GKE, with unset slice variables set to "".

  If they are unset, JAX queries a metadata server, which pods may not be able to reach.
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


def _kubernetes(environ: Mapping[str, str]) -> ProcessGroup | None:
  """Reads a pod's environment; the index is set by the manifest or by an indexed job."""
  host = environ.get("JAX_COORDINATOR_ADDRESS") or environ.get("JAX_COORDINATOR_IP")
  count = environ.get("JAX_NUM_PROCESSES") or environ.get("NNODES")
  if host is None or count is None:
    return None
  names = ("JAX_PROCESS_ID", "NODE_RANK", "JOB_COMPLETION_INDEX")
  index = next((environ[name] for name in names if name in environ), None)
  if index is None:
    raise UserError(
      f"the environment has the address of process 0 of {count}, {host}, but not this process's"
      " index: set JAX_PROCESS_ID, or run an indexed job (JOB_COMPLETION_INDEX)."
    )
  port = environ.get("JAX_COORDINATOR_PORT", str(_PORT))
  return ProcessGroup(host if ":" in host else f"{host}:{port}", int(count), int(index))


def _slurm(environ: Mapping[str, str]) -> ProcessGroup | None:
  """Reads the environment of a task of `srun`; a shell of `salloc` is not one."""
  names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
  if any(name not in environ for name in names):
    return None
  job, nodes, count, index = (environ[name] for name in names)
  return ProcessGroup(f"{first_host(nodes)}:{_port(int(job))}", int(count), int(index))


def _open_mpi(environ: Mapping[str, str]) -> ProcessGroup | None:
  """Reads the environment of a process of Open MPI's `mpirun`."""
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
      f"this is process {index} of {count} of Open MPI, which does not give the address of process"
      f" 0 (OMPI_MCA_orte_hnp_uri={launcher}): set --server_addr=HOST:PORT --num_hosts={count}"
      f" --host_idx={index}."
    )
  port = _port(int(launcher.split(".")[0]) >> 12)
  return ProcessGroup(f"{host[1] or host[2]}:{port}", int(count), int(index))


def _port(job: int) -> int:
  return _PORTS[job % len(_PORTS)]


def first_host(nodes: str) -> str:
  """Returns the first host of a Slurm list such as `node[007-012,20],other`."""
  match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*)", nodes)
  assert match is not None
  return f"{match[1]}{match[2] or ''}{match[3]}"
