# SPDX-License-Identifier: Apache-2.0
"""Two real processes that talk over loopback are two devices of one process."""

import socket

import numpy as np
import pytest
from program import TINY, curve, finish, start

from paxlike.checkpoint import Checkpoints


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_one_resumes_their_checkpoint(tmp_path):
  flags = (*TINY, "--fdl.MAX_STEPS=6", "--fdl.CHECKPOINT_EVERY_N_STEPS=3")
  together = ("--multiprocess_gpu", f"--server_addr=localhost:{free_port()}", "--num_hosts=2")
  mesh = ("--fdl.ICI_MESH_SHAPE=[1,1,1]", "--fdl.DCN_MESH_SHAPE=[1,2,1]")
  two = tmp_path / "two"
  processes = [
    start(*flags, *together, *mesh, f"--host_idx={index}", f"--job_log_dir={two}")
    for index in range(2)
  ]
  for process in processes:
    status, _, err = finish(process)
    assert status == 0, err
  one = tmp_path / "one"
  status, _, err = finish(start(*flags, "--num_cpu_devices=2", f"--job_log_dir={one}"))
  assert status == 0, err
  assert len(curve(two)) == 6
  np.testing.assert_allclose(curve(two), curve(one), rtol=1e-5)
  assert Checkpoints(two / "checkpoints", keep=None).steps() == [3, 6]
  more = ("--num_cpu_devices=2", "--fdl.MAX_STEPS=8", f"--job_log_dir={two}")
  status, out, err = finish(start(*TINY, *more))
  assert status == 0, err
  assert "resuming from checkpoint 6" in out
  assert [updates for updates, _ in curve(two)] == list(range(1, 9))
