# SPDX-License-Identifier: Apache-2.0
"""What environments of clusters say of a job's processes."""

import pytest
from helpers.sources import REPOSITORY

from paxlike.cli import command_line, startup
from paxlike.devices import jax_setup
from paxlike.errors import UserError
from paxlike.processes import cluster, multiprocess
from paxlike.processes.cluster import ProcessGroup

SLURM = {
  "SLURM_JOB_ID": "4097",
  "SLURM_STEP_NODELIST": "node[007-008]",
  "SLURM_STEP_NUM_TASKS": "16",
  "SLURM_STEP_NUM_NODES": "2",
  "SLURM_PROCID": "9",
  "SLURM_LOCALID": "1",
  "SLURM_NODEID": "1",
  "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
  "SLURM_GPUS_ON_NODE": "8",
}
OPEN_MPI = {
  "OMPI_COMM_WORLD_SIZE": "16",
  "OMPI_COMM_WORLD_RANK": "9",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
  "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
ONE_A_NODE = OPEN_MPI | {
  "OMPI_COMM_WORLD_SIZE": "2",
  "OMPI_COMM_WORLD_RANK": "1",
  "OMPI_COMM_WORLD_LOCAL_RANK": "0",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
POD = {
  "JAX_COORDINATOR_ADDRESS": "train-0.train",
  "JAX_NUM_PROCESSES": "4",
  "JOB_COMPLETION_INDEX": "2",
}


@pytest.mark.parametrize(
  ("environ", "group"),
  [
    ({}, None),
    (SLURM, ProcessGroup("node007:61441", 16, 9, (1,))),
    # One task a node has all of the node's devices.
    (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
              "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
     ProcessGroup("node007:61441", 2, 1)),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    # A shell on the first node of an allocation is no task of it.
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),
    (OPEN_MPI, ProcessGroup("10.96.0.1:62624", 16, 9, (1,))),
    (ONE_A_NODE, ProcessGroup("10.96.0.1:62624", 2, 1)),
    (POD, ProcessGroup("train-0.train:8476", 4, 2)),
    (POD | {"JAX_COORDINATOR_ADDRESS": "a:99", "JAX_PROCESS_ID": "1"}, ProcessGroup("a:99", 4, 1)),
    (
      {"JAX_COORDINATOR_IP": "a", "JAX_COORDINATOR_PORT": "7", "NNODES": "2", "NODE_RANK": "0"},
      ProcessGroup("a:7", 2, 0),
    ),
    # Slurm starts the pods' shells too, but they say more.
    (SLURM | POD, ProcessGroup("train-0.train:8476", 4, 2)),
  ],
)  # fmt: skip
def test_a_cluster_tells_who_the_processes_are(environ, group):
  assert cluster.detect(environ, lambda: 8) == group


EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
TWO = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
# As docs/starting.md says it: what started a process -> its environment.
STARTED = {
  "`srun --ntasks-per-node=1`": SLURM
  | EIGHT
  | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"},
  "`srun --ntasks-per-node=8`": SLURM | EIGHT,
  "`srun --ntasks-per-node=8 --gpus-per-task=1`": SLURM | {"CUDA_VISIBLE_DEVICES": "0"},
  "`srun --ntasks-per-node=2`": TWO | EIGHT,
  "`srun --ntasks-per-node=2`, half a node allocated": TWO
  | {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "SLURM_GPUS_ON_NODE": "4"},
  "`srun --ntasks-per-node=8 run_pile_multinode.sh ...`": SLURM,
  "`mpirun --npernode 8`": OPEN_MPI,
  "`mpirun --npernode 1`": ONE_A_NODE,
  "Kubernetes, a pod a node": POD,
  "Kubernetes, a pod a GPU": POD | {"NVIDIA_VISIBLE_DEVICES": "GPU-8f3a"},
}


def rows_of_the_docs() -> dict[str, list[str]]:
  path = REPOSITORY / "docs" / "starting.md"
  table = path.read_text().split("## TPUs")[0]
  rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
  return {name.strip(): [cell.strip() for cell in rest] for name, *rest in rows[1:]}


def test_the_docs_name_each_way_to_start():
  assert list(rows_of_the_docs()) == list(STARTED)


@pytest.mark.parametrize("name", STARTED)
def test_a_process_takes_the_gpus_that_the_docs_say(name):
  environ, (processes, visible, takes) = STARTED[name], rows_of_the_docs()[name]
  is_pod = "Kubernetes" in name
  group = cluster.detect(environ, lambda: int(visible) if is_pod else 8)
  assert group is not None
  told = "all" if group.devices is None else ", ".join(map(str, group.devices))
  assert told == takes
  if "CUDA_VISIBLE_DEVICES" in environ:
    assert len(environ["CUDA_VISIBLE_DEVICES"].split(",")) == int(visible)
  if not is_pod:  # Each is alone in its own.
    assert cluster.local_rank_and_size(environ)[1] == int(processes)


def test_processes_that_flags_name_split_gpus_as_those_that_are_found(monkeypatch):
  joined: list[ProcessGroup] = []
  monkeypatch.setattr(multiprocess, "initialize", lambda group, **named: joined.append(group))
  monkeypatch.setattr(jax_setup, "has_started", lambda: False)
  monkeypatch.delenv("JAX_PLATFORMS", raising=False)
  for name, value in SLURM.items():
    monkeypatch.setenv(name, value)
  named = ["--server_addr=a:1", "--num_hosts=16", "--host_idx=9"]
  for more in (named, [], [*named, "--num_cpu_devices=1"]):
    startup.join(command_line.parse(["paxlike", "--fdl_config=A", "--job_log_dir=b", *more]))
  assert [group.devices for group in joined] == [(1,), (1,), None]


FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
NO_COUNT = {name: value for name, value in SLURM.items() if name != "SLURM_GPUS_ON_NODE"}


@pytest.mark.parametrize(
  ("environ", "num_gpus", "takes"),
  [
    # Half of a node by hand.
    (OPEN_MPI | FOUR | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 8, (1,)),
    # No GPU, as Slurm and people say it.
    (NO_COUNT | {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, None),
    (NO_COUNT | {"CUDA_VISIBLE_DEVICES": "-1"}, 1, None),
    (SLURM | {"SLURM_GPUS_ON_NODE": "0"}, 0, None),
    (TWO | {"CUDA_VISIBLE_DEVICES": "0,1,-1,3", "SLURM_GPUS_ON_NODE": "2"}, 8, (1,)),
    (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2)", "JAX_PLATFORMS": "cpu"}, 8, None),
    # GPUs that are not NVIDIA's.
    (OPEN_MPI, 0, (1,)),
    (OPEN_MPI | {"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 0, (1,)),
    (OPEN_MPI | {"ROCR_VISIBLE_DEVICES": "1"}, 0, None),
    # Each process has its own part of a GPU.
    (OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "MIG-b"}, 1, None),
    # Containers that show each process a GPU of its own.
    (OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "0"}, 1, None),
    (SLURM | {"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 1, None),
    (SLURM | {"SLURM_GPUS_ON_NODE": "", "SLURM_STEP_TASKS_PER_NODE": "8(x2),"}, 8, (1,)),
  ],
)
def test_variables_that_name_other_gpus_or_none(environ, num_gpus, takes):
  assert cluster.own_gpus(environ, lambda: num_gpus) == takes


@pytest.mark.parametrize(
  ("changed", "says"),
  [
    ({"SLURM_NODEID": "2"}, "SLURM_STEP_TASKS_PER_NODE=8.x2. has no number of tasks"),
    ({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}, "8 processes on this node see 2 MIG instances"),
  ],
)
def test_an_environment_that_leaves_no_gpu_to_a_process_is_refused(changed, says):
  with pytest.raises(UserError, match=says):
    cluster.own_gpus(SLURM | changed, lambda: 8)


def test_gpus_that_cannot_be_split_evenly_are_said():
  environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_GPUS_ON_NODE": "8"}
  with pytest.raises(UserError, match="3 processes on this node cannot share its 8 GPUs evenly"):
    cluster.own_gpus(environ, lambda: 8)
  assert cluster.own_gpus(environ | {"SLURM_NODEID": "0"}, lambda: 8) == (2, 3)


def test_a_pod_that_does_not_know_its_number_says_what_to_set():
  with pytest.raises(UserError, match="set JAX_PROCESS_ID"):
    cluster.detect({name: POD[name] for name in list(POD)[:2]})


def test_an_mpi_that_does_not_tell_of_process_0_says_what_to_give():
  environ = {name: OPEN_MPI[name] for name in list(OPEN_MPI)[:2]}
  with pytest.raises(UserError, match="set --server_addr=HOST:PORT --num_hosts=16 --host_idx=9"):
    cluster.detect(environ)
  assert cluster.detect(environ | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


@pytest.mark.parametrize(
  ("nodes", "first"),
  [
    ("node001", "node001"),
    ("node001,host2", "node001"),
    ("node[001-015],host2", "node001"),
    ("node[003,007-015],host2", "node003"),
    ("rack2-n[10-11]-ib", "rack2-n10-ib"),
  ],
)
def test_the_first_of_slurms_hosts(nodes, first):
  assert cluster.first_host(nodes) == first
