# SPDX-License-Identifier: Apache-2.0
"""What TPUs tell of the machines that they are part of, as JAX's own detectors read it.

Callee: jax/_src/clusters/cloud_tpu_cluster.py, JAX 0.10.2 and 0.12.0.
- `GkeTpuCluster` reads the environment, `GceTpuCluster` the metadata server: hosts of a slice are
  the parts of `worker-network-endpoints`, slices MEGASCALE_NUM_SLICES of the environment or of
  `tpu-env`. `get_process_count` is their product.
- Neither is present where JAX finds no virtual machine of TPUs; the server is asked neither there
  nor where TPU_SKIP_MDS_QUERY is set.
"""

import pytest
from jax._src.clusters import cloud_tpu_cluster

from paxlike import cluster
from paxlike.errors import UserError

GCE = {
  "agent-worker-number": "1",
  "worker-network-endpoints": "unknown:8470:10.0.0.1,unknown:8470:10.0.0.2",
  "tpu-env": "ACCELERATOR_TYPE: 'v5p-16'",
}


@pytest.mark.parametrize(
  ("environ", "metadata", "count"),
  [
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, None, 1),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "1"}, None, 2),
    ({"TPU_WORKER_HOSTNAMES": "a,b", "MEGASCALE_NUM_SLICES": "2"}, None, 4),
    ({}, GCE, 2),
    ({}, GCE | {"tpu-env": "MEGASCALE_NUM_SLICES: '3'"}, 6),
    ({}, GCE | {"worker-network-endpoints": "only-one"}, 1),
    ({"TPU_SKIP_MDS_QUERY": "1"}, None, 1),
  ],
)
def test_tpus_tell_of_each_other(monkeypatch, environ, metadata, count):
  """By JAX's own detectors; None: the metadata server must not be asked."""
  for name in ("TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY", "MEGASCALE_NUM_SLICES"):
    monkeypatch.delenv(name, raising=False)
  for name, value in environ.items():
    monkeypatch.setenv(name, value)

  def get_metadata(key: str) -> tuple[str, int]:
    if metadata is None and key != "tpu-env":
      pytest.fail(f"the metadata server is asked for {key}")
    return (metadata or {"tpu-env": ""})[key], 200

  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get_metadata)
  assert cluster.num_tpu_processes() == count


def test_a_metadata_server_that_does_not_answer_is_said(monkeypatch):
  for name in ("TPU_WORKER_HOSTNAMES", "TPU_SKIP_MDS_QUERY"):
    monkeypatch.delenv(name, raising=False)

  def get_metadata(key: str) -> tuple[str, int]:
    raise ConnectionError(f"no answer for {key}")

  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
  monkeypatch.setattr(cloud_tpu_cluster, "get_metadata", get_metadata)
  with pytest.raises(UserError, match="TPU_SKIP_MDS_QUERY=1"):
    cluster.num_tpu_processes()
  # Where JAX finds no TPU's machine nobody is asked.
  monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", False)
  assert cluster.num_tpu_processes() == 1
