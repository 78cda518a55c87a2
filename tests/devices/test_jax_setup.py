# SPDX-License-Identifier: Apache-2.0
"""What is set before JAX starts."""

import os

import pytest

from paxlike.devices import jax_setup


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
