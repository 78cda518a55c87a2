# SPDX-License-Identifier: Apache-2.0
"""Two real processes that talk over loopback are two devices of one process."""

import socket
import subprocess
import sys

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


@pytest.mark.slow
def test_experts_train_in_bfloat16_on_several_cpu_devices(tmp_path):
  flags = (
    "--fdl_config=Mixtral8x7B",
    "--fiddler=shrink",
    "--fdl.LEARNING_RATE=1e-2",
    "--fdl.LR_SCHEDULE=constant",
    "--fdl.MAX_STEPS=3",
    "--fdl.SUMMARY_INTERVAL_STEPS=1",
  )
  curves = []
  for devices, percore in ((1, 4), (4, 1)):
    folder = tmp_path / str(devices)
    more = (f"--num_cpu_devices={devices}", f"--fdl.PERCORE_BATCH_SIZE={percore}")
    status, _, err = finish(start(*flags, *more, f"--job_log_dir={folder}"))
    assert status == 0, err
    curves.append(curve(folder))
  np.testing.assert_allclose(*curves, rtol=0.01)
  assert len(curves[0]) == 3


_RESTORE = """
import sys
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
index, address, folder, mode = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, index)
import numpy as np
from paxlike.checkpoint import Checkpoints
from paxlike.layers.layout import Layout
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
where, size = NamedSharding(mesh, PartitionSpec("x")), 100_000
flat = Layout(scanned=False, repeats=0)
def values(step): return np.random.default_rng(step).normal(size=size).astype(np.float32)
with Checkpoints(folder, keep=None) as saved:
  if mode == "save":
    for step in (1, 2):
      w = jax.make_array_from_callback((size,), where, lambda part: values(step)[part])
      saved.save(step, {"w": w}, layout=flat, train_input={})
  else:
    target = {"w": jax.ShapeDtypeStruct((size,), np.float32, sharding=where)}
    step, restored = saved.restore_latest_valid(target, layout=flat)
    shard = restored.state["w"].addressable_shards[0]
    assert np.array_equal(shard.data, values(step)[shard.index])
    print("restored", step)
"""


@pytest.mark.slow
def test_processes_go_on_from_the_same_checkpoint_if_one_cannot_read_its_part(tmp_path):
  def both(mode: str) -> list[tuple[int, str, str]]:
    arguments = (f"localhost:{free_port()}", str(tmp_path), mode)
    processes = [
      subprocess.Popen(
        [sys.executable, "-c", _RESTORE, str(index), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index in range(2)
    ]
    return [finish(process) for process in processes]

  assert [status for status, _, _ in both("save")] == [0, 0]
  parts = list(tmp_path.glob("checkpoint_00000002/state/ocdbt.process_1/d/*"))
  largest = max(parts, key=lambda path: path.stat().st_size)
  assert largest.stat().st_size > 100_000
  largest.write_bytes(largest.read_bytes()[:1000])
  for status, out, err in both("load"):
    assert status == 0, err
    assert out.splitlines()[-1] == "restored 1"
    assert "checkpoint_00000002 is damaged" in err
