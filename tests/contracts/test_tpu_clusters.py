# SPDX-License-Identifier: Apache-2.0
"""What TPUs tell of the machines that they are part of, as JAX's own detectors read it.

Callee: jax/_src/clusters/cloud_tpu_cluster.py, JAX 0.10.2 and 0.12.0.
- `GkeTpuCluster` reads the environment, `GceTpuCluster` the metadata server: hosts of a slice are
  the parts of `worker-network-endpoints`, slices MEGASCALE_NUM_SLICES of the environment or of
  `tpu-env`. `get_process_count` is their product.
- What the environment does not say of slices, `GkeTpuCluster` too asks the server, whatever
  TPU_SKIP_MDS_QUERY says; an empty variable counts as said: one slice, the first.
- Neither is present where JAX finds no virtual machine of TPUs. `GceTpuCluster` asks the server
  neither there nor where TPU_SKIP_MDS_QUERY is set.
"""

import os

import pytest
from jax._src.clusters import cloud_tpu_cluster

from paxlike.errors import UserError
from paxlike.processes import cluster

GCE = {
  "agent-worker-number": "1",
  "worker-network-endpoints": "unknown:8470:10.0.0.1,unknown:8470:10.0.0.2",
  "tpu-env": "ACCELERATOR_TYPE: 'v5p-16'",
}


@pytest.fixture(autouse=True)
def tpu_vm(monkeypatch):
  """A virtual machine of TPUs, whose environment says nothing of them."""
  for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)


@pytest.mark.parametrize(
  ("environ", "metadata", "count"),
  [
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, None, 1),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, None, 2),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, None, 4),
    ({}, GCE, 2),
    ({}, GCE | {"tpu-env": "MEGASCALE_NUM_SLICES: '3'"}, 6),
    ({}, GCE | {"worker-network-endpoints": "only-one"}, 1),
    ({"TPU_SKIP_MDS_QUERY": "1"}, None, 1),
  ],
)
def test_tpus_tell_of_each_other(monkeypatch, environ, metadata, count):
  """By JAX's own detectors; None: the metadata server must not be asked."""
  for name, value in environ.items():
    monkeypatch.setenv(name, value)

  def get_metadata(key: str) -> tuple[str, int]:
    if metadata is None:
      pytest.fail(f"the metadata server is asked for {key}")
    return metadata[key], 200

  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get_metadata)
  before = dict(os.environ)
  assert cluster.num_tpu_processes() == count
  assert os.environ == before


def test_hosts_of_gke_join_without_a_metadata_server(monkeypatch):
  environ = {"TPU_WORKER_HOSTNAMES": "localhost,b", "TPU_WORKER_ID": "1"}
  for name, value in environ.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", lambda key: pytest.fail(key))
  gke = cloud_tpu_cluster.GkeTpuCluster
  with cluster.gke_answers():
    address = gke.get_coordinator_address(1, None)
    assert (address, gke.get_process_id()) == ("localhost:8482", 1)


@pytest.mark.parametrize(
  "endpoints", [None, "<!DOCTYPE html>\n<style>*{margin:0}p{a:b;c:d}", "unknown:8470:2600:1900::1"]
)
def test_a_metadata_server_that_does_not_answer_is_said(monkeypatch, endpoints):
  def get_metadata(key: str) -> tuple[str, int]:
    if endpoints is None:
      raise ConnectionError(f"no answer for {key}")
    return (GCE | {"worker-network-endpoints": endpoints})[key], 200

  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get_metadata)
  with pytest.raises(UserError, match="TPU_SKIP_MDS_QUERY=1") as error:
    cluster.num_tpu_processes()
  assert "\n" not in str(error.value)
  # Where JAX finds no TPU's machine nobody is asked.
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", False)
  assert cluster.num_tpu_processes() == 1
