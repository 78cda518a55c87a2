# SPDX-License-Identifier: Apache-2.0
"""What is set before JAX starts."""

import os
import subprocess
import sys

import pytest

from paxlike.devices import jax_setup, malloc


@pytest.mark.parametrize(
  ("given", "threads"),
  [
    ({}, None),
    ({"JAX_NUM_CPU_DEVICES": "1"}, None),
    ({"JAX_NUM_CPU_DEVICES": "2"}, "16"),
    ({"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, "24"),
    ({"JAX_NUM_CPU_DEVICES": "2", "NPROC": "5"}, "5"),
    ({"JAX_NUM_CPU_DEVICES": "2", "PJRT_NPROC": "5"}, None),
  ],
)
def test_threads_suffice_for_devices_that_wait_in_different_collectives(
  given, threads, monkeypatch
):
  monkeypatch.setattr(os, "cpu_count", lambda: 2)
  # On two cores, two devices with two threads come to a deadlock within a few hundred steps.
  monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu"} | given)
  jax_setup.set_up()
  assert os.environ.get("NPROC") == threads


def test_devices_are_also_counted_in_a_file_of_flags(monkeypatch, tmp_path):
  flags = tmp_path / "flags.txt"
  flags.write_text("--xla_force_host_platform_device_count=30")
  monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": str(flags)})
  monkeypatch.setattr(jax_setup, "has_started", lambda: False)
  jax_setup.set_up(keep_heap=False)
  assert os.environ.get("NPROC") == "240"


# The median of the page faults of equal calls with temporaries of 160 MB.
FAULTS = """
import resource, statistics
from paxlike.devices import jax_setup
jax_setup.set_up(platform="cpu")
import jax, jax.numpy as jnp
@jax.jit
def f(x):
  outer = jax.lax.optimization_barrier(x[:4000, None] * x[None, :])
  return jnp.cumsum(outer, axis=1).max()
ones = jnp.ones(5000)
counts = []
for _ in range(6):
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  f(ones).block_until_ready()
  counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(statistics.median_low(counts))
"""


@pytest.mark.slow
@pytest.mark.skipif(malloc._function("mallopt") is None, reason="needs glibc")
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="keeps no heap beside GPUs")
def test_a_program_for_one_cpu_uses_the_memory_of_its_last_call_again():
  environment = {key: value for key, value in os.environ.items() if "MALLOC" not in key}
  environment |= {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0", "JAX_NUM_CPU_DEVICES": "1"}
  faults = int(subprocess.check_output([sys.executable, "-c", FAULTS], env=environment))
  assert faults < (160 << 20) / os.sysconf("SC_PAGE_SIZE") / 10
