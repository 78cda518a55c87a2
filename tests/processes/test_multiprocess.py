# SPDX-License-Identifier: Apache-2.0
"""Real processes that talk over loopback are the devices of one process, and end together."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import types

import jax
import numpy as np
import pytest
from etils import epath
from helpers import warm_python
from helpers.program import TEXT, TINY, curve, finish, start
from helpers.sources import REPOSITORY
from jax.experimental import multihost_utils

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.cli import command_line, flags, startup
from paxlike.devices import jax_setup, program_cache
from paxlike.errors import UserError
from paxlike.processes import cluster, host_collectives, multiprocess


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def job(
  count: int,
  folder: pathlib.Path,
  *flags: str,
  model=TINY,
  only: int | None = None,
  fault: pathlib.Path | None = None,
  signalled: bool = False,
) -> list[subprocess.Popen]:
  """Starts processes of one device each, which share a batch of four rows.

  `only` is the only one that is started, if given; the last one gets stuck where `fault` says so.
  See `start` for `signalled`.
  """
  together = (f"--server_addr=localhost:{free_port()}", f"--num_hosts={count}")
  mesh = ("--fdl.ICI_MESH_SHAPE=[1,1,1]", f"--fdl.DCN_MESH_SHAPE=[1,{count},1]")
  rows = f"--fdl.PERCORE_BATCH_SIZE={4 / count}"
  # A rate that does not depend on the number of steps.
  model = [flag for flag in model if "LR_COS" not in flag] + ["--fdl.LR_SCHEDULE=constant"]
  flags = (*model, *together, *mesh, rows, f"--job_log_dir={folder}", *flags)
  return [
    start(
      *flags,
      f"--host_idx={index}",
      fault=fault if index == count - 1 else None,
      signalled=signalled,
    )
    for index in range(count)
    if only in (None, index)
  ]


def succeed(processes: list[subprocess.Popen]) -> str:
  """Returns what the first says, when all have ended well."""
  ended = [finish(process) for process in processes]
  for status, _, err in ended:
    assert status == 0, err
  return ended[0][1]


@pytest.mark.slow
def test_four_processes_train_as_one_does_and_two_resume_their_checkpoint(tmp_path, monkeypatch):
  several, alone = tmp_path / "several", tmp_path / "alone"
  (tmp_path / "a.txt").write_text(" ".join(map(str, range(2000))))
  text = (*TEXT, f"--fdl.DATA_PATH={tmp_path}/a.txt")
  succeed(job(4, several, "--fdl.MAX_STEPS=4", model=text))
  with monkeypatch.context() as patch:
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    out = succeed(job(2, several, "--fdl.MAX_STEPS=6", model=text))
    assert "resuming from checkpoint 4" in out
    assert Checkpoints(several / "checkpoints", keep=None).steps() == [4, 6]
    # A program that is loaded from a file does not keep the order of its collectives.
    assert not list(tmp_path.glob("programs/*"))
    succeed(job(1, alone, "--fdl.MAX_STEPS=6", model=text))
  assert list(tmp_path.glob("programs/*"))
  assert [updates for updates, _ in curve(several)] == list(range(1, 7))
  np.testing.assert_allclose(curve(several), curve(alone), rtol=1e-5)
  found, expected = dict(curve(several, "eval")), dict(curve(alone, "eval"))
  np.testing.assert_allclose(found[6], expected[6], rtol=1e-5)


LONG = ("--fdl.MAX_STEPS=100000", "--fdl.CHECKPOINT_EVERY_N_STEPS=20", "--heartbeat_timeout=4")


def until_saved(folder: pathlib.Path, processes: list[subprocess.Popen]):
  """Waits until a job has its first checkpoint."""
  deadline = time.monotonic() + 200
  while not (folder / "checkpoints" / "checkpoint_00000020").exists():
    assert all(process.poll() is None for process in processes)
    assert time.monotonic() < deadline
    time.sleep(0.1)


@pytest.mark.slow
def test_two_processes_roll_back_as_one_does(tmp_path):
  """In the second stage of a ramp, and with all copies of the state compared after each step."""
  flags = ("--fdl.ON_SPIKE=rollback", "--fdl.MAX_STEPS=26", "--fdl.CHECK_REPLICAS_EVERY=1")
  sizes = ("--fdl.PERCORE_BATCH_SIZE=4", "--fdl.PERCORE_BATCH_SIZE_RAMP={4: 2}")
  model = ("--fdl_config=helpers.spiky.Spiky",)
  replicated = ("--fdl.DCN_MESH_SHAPE=[2,1,1]", *sizes, *flags)
  succeed(job(2, tmp_path / "two", *replicated, model=model))
  sizes = ("--fdl.PERCORE_BATCH_SIZE=8", "--fdl.PERCORE_BATCH_SIZE_RAMP={4: 4}")
  succeed(job(1, tmp_path / "one", *sizes, *flags, model=model))
  found = [
    [
      (one["checkpoint"], one["spike"])
      for one in json.loads((folder / "rollbacks.json").read_text())
    ]
    for folder in (tmp_path / "two", tmp_path / "one")
  ]
  assert found[0] == found[1] and found[0][0] == (16, 21)
  two, one = curve(tmp_path / "two"), curve(tmp_path / "one")
  assert [updates for updates, _ in two] == list(range(1, 27))
  np.testing.assert_allclose(two, one, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others_by_its_name_and_the_job_resumes(tmp_path, victim):
  processes = job(2, tmp_path / "run", *LONG, signalled=True)
  until_saved(tmp_path / "run", processes)
  processes[victim].kill()
  status, _, err = finish(processes[1 - victim])
  assert status == 75
  assert f"paxlike: process {victim} of 2 (" in err and "was killed: its connection closed" in err
  assert f"; process {1 - victim} of 2 (" in err
  assert "Check failure stack trace" not in err
  assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "lost"
  processes[victim].communicate()
  saved = Checkpoints(tmp_path / "run" / "checkpoints", keep=None).steps()[-1]
  out = succeed(job(2, tmp_path / "run", f"--fdl.MAX_STEPS={saved + 3}"))
  assert f"resuming from checkpoint {saved}" in out
  assert [updates for updates, _ in curve(tmp_path / "run")] == list(range(1, saved + 4))


@pytest.mark.slow
def test_a_job_is_alone_in_its_folder_and_stops_after_the_same_step_everywhere(tmp_path):
  processes = job(2, tmp_path, *LONG, signalled=True)
  until_saved(tmp_path, processes)
  for status, _, err in map(finish, job(2, tmp_path, *LONG)):
    assert status == 2, err
    assert f"paxlike: --job_log_dir={tmp_path} is in use" in err and err.count("\n") == 1
  processes[1].send_signal(signal.SIGINT)
  assert [finish(process)[0] for process in processes] == [143, 130]
  last = curve(tmp_path)[-1][0]
  assert Checkpoints(tmp_path / "checkpoints", keep=None).steps()[-1] == last


@pytest.mark.slow
def test_who_does_not_come_is_named(tmp_path):
  status, _, err = finish(job(2, tmp_path / "run", "--join_timeout=2", only=0)[0])
  assert status == 75
  assert "paxlike: process 1 of 2 did not connect to localhost:" in err and err.count("\n") == 1
  assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_asleep_in_its_data_ends_all_by_its_name(tmp_path):
  fault = tmp_path / "fault"
  processes = job(2, tmp_path / "run", *LONG, fault=fault)
  until_saved(tmp_path / "run", processes)
  fault.write_text("data")
  for index, process in enumerate(processes):
    status, _, err = finish(process)
    assert status == 75
    assert "paxlike: process 1 of 2 (" in err and "is stuck: waiting for data of step" in err
    assert len([*(tmp_path / "run" / "stacks").glob(f"process_{index:05d}_*.txt")]) == 1
  told = json.loads((tmp_path / "run" / "status.json").read_text())
  assert told["state"] == "stalled" and "process 1 of 2" in told["reason"]


@pytest.mark.slow
def test_a_process_that_fails_is_named_before_its_time_is_up(tmp_path):
  """One process cannot read the data that the others have."""
  (tmp_path / "texts").mkdir()
  (tmp_path / "texts" / "a.txt").write_text("words and words " * 500)
  flags = [flag for flag in TEXT if "PERCORE" not in flag]
  address = f"--server_addr=localhost:{free_port()}"
  processes = [
    start(
      *flags,
      *(address, "--num_hosts=2", f"--host_idx={index}", "--fdl.DCN_MESH_SHAPE=[2,1,1]"),
      "--fdl.PERCORE_BATCH_SIZE=2",
      "--fdl.MAX_STEPS=5",
      f"--fdl.DATA_PATH={tmp_path}/{name}/*.txt",
      f"--job_log_dir={tmp_path}/run",
    )
    for index, name in enumerate(("texts", "missing"))
  ]
  (first, _, err), (second, _, own) = map(finish, processes)
  assert (first, second) == (1, 2)
  assert "process 1 of 2 (" in err and "has failed" in err
  assert "missing" in own


@pytest.mark.slow
def test_an_exception_in_a_save_is_named_and_not_what_jax_says_of_it_elsewhere(tmp_path):
  fault = tmp_path / "fault"
  processes = job(2, tmp_path / "run", *LONG, fault=fault)
  until_saved(tmp_path / "run", processes)
  fault.write_text("save raises")
  (first, _, err), (second, _, own) = map(finish, processes)
  assert (first, second) == (1, 1)
  assert "has failed: RuntimeError: disk quota exceeded; process 0 of 2 (" in err
  assert "could not be written" not in err and "Traceback" not in err and "Traceback" in own


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
from paxlike.checkpoints import warm_start
from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.layers.stack_layout import Layout
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
    if mode == "late" and index:  # It does not see the newest yet.
      saved.steps = lambda: [1]
    target = {"w": jax.ShapeDtypeStruct((size,), np.float32, sharding=where)}
    step, restored = saved.restore_latest_valid(target, layout=flat)
    shard = restored.state["w"].addressable_shards[0]
    assert np.array_equal(shard.data, values(step)[shard.index])
    with_all = warm_start.read_found(saved, None, lambda step: None)
    print("restored", step, with_all[0])
"""


@pytest.mark.slow
def test_processes_go_on_from_the_same_checkpoint_if_one_lists_or_reads_less(tmp_path):
  script = tmp_path / "restore.py"
  script.write_text(_RESTORE)

  def both(mode: str) -> list[tuple[int, str, str]]:
    arguments = (f"localhost:{free_port()}", str(tmp_path / "checkpoints"), mode)
    processes = [
      subprocess.Popen(
        [warm_python.program(), script, str(index), *arguments],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
      for index in range(2)
    ]
    return [finish(process) for process in processes]

  assert [status for status, _, _ in both("save")] == [0, 0]
  for status, out, err in both("late"):
    assert status == 0, err
    assert out.splitlines()[-1] == "restored 2 2"
  parts = list(tmp_path.glob("checkpoints/checkpoint_00000002/state/ocdbt.process_1/d/*"))
  largest = max(parts, key=lambda path: path.stat().st_size)
  content = bytearray(largest.read_bytes())
  content[len(content) // 2] ^= 1
  largest.write_bytes(content)
  for status, out, err in both("load"):
    assert status == 0, err
    assert out.splitlines()[-1] == "restored 1 2"
    assert "checkpoint_00000002 is damaged" in err


@pytest.mark.slow
@pytest.mark.parametrize("saving", [True, False])
def test_folders_of_their_own_are_refused_where_checkpoints_are_saved(tmp_path, saving):
  """As on nodes whose disks are not shared: the first save would wait forever."""
  folders = [tmp_path / "a", tmp_path / "b"]
  together = (f"--server_addr=localhost:{free_port()}", "--num_hosts=2")
  mesh = ("--fdl.ICI_MESH_SHAPE=[1,1,1]", "--fdl.DCN_MESH_SHAPE=[1,2,1]")
  more = ("--fdl.MAX_STEPS=1", f"--enable_checkpoint_saving={saving}")
  processes = [
    start(*TINY, *together, *mesh, *more, f"--host_idx={index}", f"--job_log_dir={folder}")
    for index, folder in enumerate(folders)
  ]
  for process in processes:
    status, _, err = finish(process)
    if saving:
      assert status == 2
      assert "is not the same folder in all processes: process 1 does not see" in err
    else:
      assert status == 0, err
  assert saving is not any(folder.exists() for folder in folders)


def test_a_folder_that_process_0_cannot_write_in_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  same = types.SimpleNamespace(
    broadcast_one_to_all=lambda number: number, process_allgather=lambda said: [said, b" "]
  )
  monkeypatch.setattr(multiprocess, "multihost_utils", same)
  with pytest.raises(UserError, match="missing cannot be written: No such file or directory"):
    multiprocess.check_shared(epath.Path(tmp_path / "missing"))


@pytest.mark.parametrize("index", [0, 1])
def test_what_process_0_does_not_find_is_refused_in_all_processes(tmp_path, monkeypatch, index):
  said = np.frombuffer(b"no checkpoint 3 in there; there is: 2.".ljust(600), np.uint8)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: index)
  sent = []
  monkeypatch.setattr(
    multihost_utils, "broadcast_one_to_all", lambda value: sent.append(value) or said
  )
  with pytest.raises(UserError, match=r"^no checkpoint 3 in there; there is: 2\.$"):
    host_collectives.broadcast(lambda: [Checkpoints(tmp_path, keep=None).find(3)])
  assert (b"no checkpoint 3" in bytes(sent[0])) is (index == 0)


@pytest.mark.parametrize("flag", ["--list", "--fdl_help", "--mode=show", "--mode=compile"])
def test_what_only_prints_joins_nobody(monkeypatch, flag):
  joined = []
  monkeypatch.setattr(multiprocess, "initialize", lambda group, **named: joined.append(group))
  monkeypatch.setattr(jax_setup, "has_started", lambda: False)
  own = ("--server_addr=localhost:1", "--num_hosts=2", "--host_idx=1")
  startup.join(command_line.parse(["paxlike", "--fdl_config=Gpt3_52k", *own, flag]))
  assert bool(joined) is (flag == "--mode=compile")


@pytest.mark.parametrize(
  ("gpus", "nodes", "folder", "kept"),
  [(8, 2, None, False), (8, 2, "/xla", True), (8, 1, None, True), (0, 2, None, True)],
)
def test_processes_of_gpus_keep_programs_only_where_all_see_them(
  monkeypatch, gpus, nodes, folder, kept
):
  """Else one of them finds what the others wait for it to measure."""
  monkeypatch.setattr(multiprocess, "initialize", lambda group, **named: None)
  monkeypatch.setattr(jax_setup, "has_started", lambda: False)
  monkeypatch.setattr(cluster, "num_gpus", lambda: gpus)
  monkeypatch.delenv("JAX_PLATFORMS")
  monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
  monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
  monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
  if folder is not None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
  set_to = {"jax_enable_compilation_cache": True}
  monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
  program_cache.enable("/own")
  startup.join(flags.Options(server_addr="localhost:1", num_hosts=2 * nodes, host_idx=0))
  assert set_to["jax_enable_compilation_cache"] is kept
