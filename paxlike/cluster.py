# SPDX-License-Identifier: Apache-2.0
"""What a cluster's environment says of the processes of a job."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from paxlike.errors import UserError

_PORTS = range(61440, 65536)  # Of those that systems give to no service; a job takes one by number.
_PORT = 8476


class Group(NamedTuple):
  """The processes of a job, as one of them sees them.

  Attributes:
    address: HOST:PORT of process 0.
    count: Of processes.
    index: Of this process.
    devices: The machine's devices that this process has; None: all.
  """

  address: str
  count: int
  index: int
  devices: tuple[int, ...] | None = None


def found(environ: Mapping[str, str]) -> Group | None:
  """Returns the group that an environment tells of; None if it is of a single process.

  Raises:
    UserError: It says one thing and not another.
  """
  # What mpirun starts within a job of Slurm has the environment of both.
  for read in (_kubernetes, _open_mpi, _slurm):
    group = read(environ)
    if group is not None:
      return group if group.count > 1 else None
  return None


def is_tpu_pod(environ: Mapping[str, str]) -> bool:
  """Whether JAX finds out from the TPUs that there are other processes."""
  workers = environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
  return len(workers) > 1 or int(environ.get("MEGASCALE_NUM_SLICES", "1")) > 1


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
  address = f"{first_host(nodes)}:{_port(int(job))}"
  alone = environ.get("SLURM_STEP_NUM_NODES") == count
  return Group(address, int(count), int(index), _own(environ, "SLURM_LOCALID", alone=alone))


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
  alone = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
  devices = _own(environ, "OMPI_COMM_WORLD_LOCAL_RANK", alone=alone)
  return Group(f"{host[1] or host[2]}:{port}", int(count), int(index), devices)


def _own(environ: Mapping[str, str], name: str, *, alone: bool) -> tuple[int, ...] | None:
  """A process that shares a machine with others has one device of it, by its number there."""
  return None if alone or name not in environ else (int(environ[name]),)


def _port(job: int) -> int:
  return _PORTS[job % len(_PORTS)]


def first_host(nodes: str) -> str:
  """Returns the first of Slurm's list of hosts, such as `node[007-012,20],other`."""
  match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,]*)", nodes)
  assert match is not None
  return f"{match[1]}{match[2] or ''}{match[3]}"
