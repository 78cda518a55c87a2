# SPDX-License-Identifier: Apache-2.0
"""What environments of clusters say of a job's processes."""

import pathlib

import pytest

from paxlike import cluster
from paxlike.cluster import Group
from paxlike.errors import UserError

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
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
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
    (SLURM, Group("node007:61441", 16, 9, (1,))),
    # One task a node has all of the node's devices.
    (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
              "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
     Group("node007:61441", 2, 1)),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    # A shell on the first node of an allocation is no task of it.
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),
    (OPEN_MPI, Group("10.96.0.1:62624", 4, 3, (4, 5, 6, 7))),
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, Group("10.96.0.1:62624", 4, 3)),
    (POD, Group("train-0.train:8476", 4, 2)),
    (POD | {"JAX_COORDINATOR_ADDRESS": "a:99", "JAX_PROCESS_ID": "1"}, Group("a:99", 4, 1)),
    (
      {"JAX_COORDINATOR_IP": "a", "JAX_COORDINATOR_PORT": "7", "NNODES": "2", "NODE_RANK": "0"},
      Group("a:7", 2, 0),
    ),
    # Slurm starts the pods' shells too, but they say more.
    (SLURM | POD, Group("train-0.train:8476", 4, 2)),
  ],
)  # fmt: skip
def test_a_cluster_tells_who_the_processes_are(environ, group):
  assert cluster.found(environ, lambda: 8) == group


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
  "`mpirun --npernode 8`": OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"},
  "`mpirun --npernode 1`": OPEN_MPI
  | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
  "Kubernetes, a pod a node": POD,
  "Kubernetes, a pod a GPU": POD | {"NVIDIA_VISIBLE_DEVICES": "GPU-8f3a"},
}


def rows_of_the_docs() -> dict[str, list[str]]:
  path = pathlib.Path(__file__).resolve().parent.parent / "docs" / "starting.md"
  table = path.read_text().split("## TPUs")[0]
  rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
  return {name.strip(): [cell.strip() for cell in rest] for name, *rest in rows[1:]}


def test_the_docs_name_each_way_to_start():
  assert list(rows_of_the_docs()) == list(STARTED)


@pytest.mark.parametrize("name", STARTED)
def test_a_process_takes_the_gpus_that_the_docs_say(name):
  environ, (_, visible, takes) = STARTED[name], rows_of_the_docs()[name]
  group = cluster.found(environ, lambda: 1 if name.endswith("a GPU") else 8)
  assert group is not None
  told = "all" if group.devices is None else ", ".join(map(str, group.devices))
  assert told == takes
  if "CUDA_VISIBLE_DEVICES" in environ:
    assert len(environ["CUDA_VISIBLE_DEVICES"].split(",")) == int(visible)
  # Flags that say who the processes are, as those of the scripts, change nothing of it.
  if "Kubernetes" not in name:
    assert cluster.own_gpus(environ, lambda: 8) == group.devices


def test_gpus_that_cannot_be_split_evenly_are_said():
  environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_GPUS_ON_NODE": "8"}
  with pytest.raises(UserError, match="3 processes on this node cannot share its 8 GPUs evenly"):
    cluster.own_gpus(environ, lambda: 8)
  assert cluster.own_gpus(environ | {"SLURM_NODEID": "0"}, lambda: 8) == (2, 3)
  assert cluster.own_gpus(SLURM | {"SLURM_GPUS_ON_NODE": "0"}, lambda: 0) is None


def test_a_pod_that_does_not_know_its_number_says_what_to_set():
  with pytest.raises(UserError, match="set JAX_PROCESS_ID"):
    cluster.found({name: POD[name] for name in list(POD)[:2]})


def test_an_mpi_that_does_not_tell_of_process_0_says_what_to_give():
  environ = {name: OPEN_MPI[name] for name in list(OPEN_MPI)[:2]}
  with pytest.raises(UserError, match="give --server_addr=HOST:PORT --num_hosts=4 --host_idx=3"):
    cluster.found(environ)
  assert cluster.found(environ | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


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
