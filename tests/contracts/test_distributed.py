# SPDX-License-Identifier: Apache-2.0
"""What JAX means by the arguments of joining processes, and by those of its key-value store.

Callee: jax/_src/distributed.py and the extension module of jaxlib, JAX 0.10.2 and 0.12.0.
- `State.initialize`: `local_device_ids` become `jax_cuda_visible_devices` (and ROCm's): numbers
  among the devices that CUDA_VISIBLE_DEVICES leaves, and without effect on CPUs and TPUs. None: all
  of them, *unless* JAX_LOCAL_DEVICE_IDS is set. `cluster_detection_method="deactivate"`: what is
  not given is not looked for; otherwise a missing `local_device_ids` becomes the process's own
  number on its node. The coordinator listens on [::] at the port of its address.
  `heartbeat_timeout_seconds` is an int.
- `key_value_set` raises ALREADY_EXISTS unless `allow_overwrite`; `key_value_try_get` raises
  NOT_FOUND, `key_value_dir_get` gives [] where there is nothing; it gives whole keys, and those of
  folder a/b are not those of a/bc. All errors are RuntimeErrors.
"""

import contextlib
import inspect
import socket
import types
from typing import Any

import jax
import pytest
from jax._src import distributed as jax_distributed
from jax._src import lib

from paxlike import cluster, distributed


def _any(module: Any) -> Any:
  """Returns it, for what it does not export."""
  return module


@pytest.fixture
def client():
  """Of a real service, in this process."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  library: Any = lib
  service = library._jax.get_distributed_runtime_service(
    f"[::]:{port}", 1, heartbeat_timeout=100, shutdown_timeout=10
  )
  one = library._jax.get_distributed_runtime_client(
    f"localhost:{port}", 0, init_timeout=20, use_compression=True, heartbeat_timeout=100
  )
  one.connect()
  yield one
  with contextlib.suppress(RuntimeError):
    one.shutdown()
  service.shutdown()


def test_the_store_overwrites_only_when_told(client):
  client.key_value_set("a/b/0", "first")
  with pytest.raises(RuntimeError, match="ALREADY_EXISTS"):
    client.key_value_set("a/b/0", "second")
  client.key_value_set("a/b/0", "third", allow_overwrite=True)
  client.key_value_set("a/bc", "of no folder a/b")
  assert client.key_value_try_get("a/b/0") == "third"
  assert client.key_value_dir_get("a/b") == [("a/b/0", "third")]
  assert client.key_value_dir_get("none") == []
  with pytest.raises(RuntimeError, match="NOT_FOUND"):
    client.key_value_try_get("none")


def test_a_watch_reads_its_signs_from_a_real_store(client, monkeypatch):
  monkeypatch.setattr(jax_distributed.global_state, "client", client)
  monkeypatch.setattr(jax_distributed.global_state, "coordinator_address", "localhost:1")
  libc = types.SimpleNamespace(signal=lambda *arguments: None)  # Or this process would be changed.
  monkeypatch.setattr(distributed.ctypes, "CDLL", lambda name: libc)
  watch = distributed.Watch(timeout=60.0)
  assert watch._look() is None and watch._ask() is None
  client.key_value_set("paxlike/process/1", "failed elsewhere", allow_overwrite=True)
  assert watch._look() == "process 1 of 1 (on elsewhere) has failed"
  client.key_value_set("paxlike/gone", "process 1", allow_overwrite=True)
  assert watch._ask() == "process 1"


@pytest.mark.parametrize("devices", [None, (2, 3)])
def test_what_initialize_is_given(monkeypatch, devices):
  bound: dict[str, Any] = {}
  signature = inspect.signature(jax.distributed.initialize)

  def initialize(*arguments, **named):
    bound.update(signature.bind(*arguments, **named).arguments)

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  distributed.initialize(cluster.Group("[::1]:8476", 4, 2, devices), timeout=7.5)
  later = bound.pop("heartbeat_timeout_seconds")
  assert type(later) is int and later > 2 * 7.5
  assert bound == {
    "coordinator_address": "[::1]:8476",
    "num_processes": 4,
    "process_id": 2,
    "local_device_ids": devices,
    "cluster_detection_method": "deactivate",
  }


def test_local_devices_become_cudas_visible_ones_and_nothing_else(monkeypatch):
  """Without devices of its own a process has all that it sees: nothing is set."""
  settings: dict[str, str] = {}
  state, module = jax_distributed.State(), _any(jax_distributed)
  monkeypatch.setattr(module.config, "update", settings.__setitem__)

  def stop(*arguments, **named):
    raise InterruptedError

  monkeypatch.setattr(module._jax, "get_distributed_runtime_client", stop)
  monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
  for devices, expected in ((None, None), ((2, 3), "2,3")):
    settings.clear()
    with pytest.raises(InterruptedError):
      state.initialize(
        "localhost:1",
        2,
        1,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=40,
      )
    assert settings.get("jax_cuda_visible_devices") == expected
