# SPDX-License-Identifier: Apache-2.0
"""What environments of clusters say of a job's processes."""

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
    (SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
     Group("node007:61441", 2, 1)),
    (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
    # A shell on the first node of an allocation is no task of it.
    ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None),
    (OPEN_MPI, Group("10.96.0.1:62624", 4, 3, (1,))),
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
  assert cluster.found(environ) == group


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


def test_tpus_tell_of_each_other():
  assert not cluster.is_tpu_pod({})
  assert not cluster.is_tpu_pod({"TPU_WORKER_HOSTNAMES": "localhost"})
  assert cluster.is_tpu_pod({"TPU_WORKER_HOSTNAMES": "a,b"})
  assert cluster.is_tpu_pod({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"})
