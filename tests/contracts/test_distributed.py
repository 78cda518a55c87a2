# SPDX-License-Identifier: Apache-2.0
"""What JAX means by the arguments of joining processes, and what its client does without process 0.

Callee: jax/_src/distributed.py and the extension module of jaxlib, JAX 0.10.2 and 0.12.0.
- `State.initialize`: `local_device_ids` become `jax_cuda_visible_devices` (and ROCm's): numbers
  among the devices that CUDA_VISIBLE_DEVICES leaves, and without effect on CPUs and TPUs. None: all
  of them, *unless* JAX_LOCAL_DEVICE_IDS is set. `cluster_detection_method="deactivate"`: what is
  not given is not looked for; otherwise a missing `local_device_ids` becomes the process's own
  number on its node. The coordinator listens on [::] at the port of its address.
  `heartbeat_timeout_seconds` is an int.
- The client prints "Check failure stack trace" and aborts as soon as its connection to the service
  ends. `missed_heartbeat_callback` would be asked first, but its argument cannot be made a Python
  object: std::bad_cast ends the process. As long as another process holds the service's end of the
  connection, nothing happens.
- `create_preemption_sync_manager` takes SIGTERM for itself; `reached_preemption_sync_point` is then
  what asks for it.
"""

import inspect
import socket
import subprocess
import sys
from typing import Any

import jax
import pytest
from jax._src import distributed as jax_distributed

from paxlike.processes import cluster, multiprocess, rendezvous


def _any(module: Any) -> Any:
  """Returns it, for what it does not export."""
  return module


_CLIENT = """
import os, signal, sys, time
from jax._src import lib
from paxlike.processes import multiprocess
index, port = int(sys.argv[1]), int(sys.argv[2])
if index == 0:
  service = lib._jax.get_distributed_runtime_service(
    f"[::]:{port}", 2, heartbeat_timeout=100000, shutdown_timeout=10
  )
client = lib._jax.get_distributed_runtime_client(
  f"localhost:{port}", index, init_timeout=60, use_compression=True, heartbeat_timeout=100000
)
client.connect()
client.wait_at_barrier("both are there", 60000)
if index == 0:
  if sys.argv[3] == "held":
    multiprocess._hold(port, [])
  os.kill(os.getpid(), signal.SIGKILL)
time.sleep(2)
print("still there", flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("held", ["held", "not"])
def test_a_client_lives_on_while_somebody_holds_its_connection(held):
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  both = [
    subprocess.Popen(
      [sys.executable, "-c", _CLIENT, str(index), str(port), held],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for index in range(2)
  ]
  (_, _), (out, err) = (process.communicate(timeout=120) for process in both)
  assert (out == "still there\n") is (held == "held"), err
  assert ("Check failure stack trace" in err) is (held == "not")


@pytest.mark.parametrize("devices", [None, (2, 3)])
def test_what_initialize_is_given(monkeypatch, devices):
  bound: dict[str, Any] = {}
  connections = rendezvous.Connections({}, {}, ("a", 1))
  monkeypatch.setattr(rendezvous, "meet", lambda group, told, timeout: connections)
  monkeypatch.setattr(multiprocess.job_watch, "start", lambda connections, **named: None)
  monkeypatch.setattr(multiprocess, "_watch_aborts", lambda: None)
  monkeypatch.setattr(multiprocess.signal, "signal", lambda number, handler: None)
  signature = inspect.signature(jax.distributed.initialize)

  def initialize(*arguments, **named):
    bound.update(signature.bind(*arguments, **named).arguments)

  monkeypatch.setattr(jax.distributed, "initialize", initialize)
  multiprocess.initialize(cluster.ProcessGroup("[::1]:8476", 4, 2, devices), timeout=7.5)
  seconds = {name: bound.pop(name) for name in [*bound] if name.endswith(("timeout", "_seconds"))}
  assert seconds.keys() == {
    "initialization_timeout",
    "heartbeat_timeout_seconds",
    "shutdown_timeout_seconds",
  }
  assert all(type(one) is int for one in seconds.values())
  assert seconds["heartbeat_timeout_seconds"] > 10**5
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
