# SPDX-License-Identifier: Apache-2.0
"""Steps that are compiled in one process and run in another."""

import hashlib
import importlib
import json
import os
import pathlib
import pickle
import socket
import types

import jax
import pytest
from helpers.program import TINY, finish, run, start
from jax.experimental.compilation_cache import compilation_cache

from paxlike.compilation import saved_step
from paxlike.errors import UserError

STEPS = (*TINY, "--fdl.MAX_STEPS=3")
MESH = "--fdl.ICI_MESH_SHAPE=[2,2,2]"
CACHE = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


def gpus(kind, capability, process_indexes, cores=132):
  own = {"device_kind": kind, "compute_capability": capability, "core_count": cores}
  return [
    types.SimpleNamespace(platform="gpu", slice_index=index, **own) for index in process_indexes
  ]


def test_gpus_that_are_named_are_those_that_are_there():
  """As JAX names hardware: one slice a host."""
  named = saved_step._kind(gpus("NVIDIA H100", "9.0", [0, 0]))
  assert named == saved_step._kind(gpus("NVIDIA H100 80GB HBM3", "9.0", [0, 1]))
  assert named != saved_step._kind(gpus("NVIDIA H200", "9.0", [0, 1]))
  assert named != saved_step._kind(gpus("NVIDIA H100 PCIe", "9.0", [0, 1], cores=114))
  assert named != saved_step._kind(gpus("NVIDIA A100-SXM4-80GB", "8.0", [0, 1]))
  unknown = [saved_step._kind(gpus(kind, "8.9", [0])) for kind in ("NVIDIA L4", "NVIDIA L40S")]
  assert unknown[0] != unknown[1]


def losses(folder: pathlib.Path) -> list[float]:
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [row["loss"] for row in map(json.loads, lines) if row.get("kind") == "train"]


@pytest.fixture(scope="module")
def step(tmp_path_factory) -> pathlib.Path:
  path = tmp_path_factory.mktemp("steps") / "step.bin"
  assert run(*STEPS, MESH, "--mode=compile", f"--save={path}") == 0
  assert [file.name for file in path.parent.iterdir()] == ["step.bin"]
  return path


def test_a_file_is_written_anew(tmp_path):
  path = tmp_path / "step.bin"
  path.write_text("before")
  assert run(*STEPS, "--mode=compile", f"--save={path}") == 0
  assert path.stat().st_size > 1000


@pytest.mark.slow
def test_a_run_with_a_saved_step_is_the_same_run(step, tmp_path, capsys):
  assert run(*STEPS, MESH, f"--job_log_dir={tmp_path}/own") == 0
  assert run(*STEPS, MESH, f"--compiled_step={step}", f"--job_log_dir={tmp_path}/saved") == 0
  assert capsys.readouterr().out.count("compiled the step in") == 1
  assert losses(tmp_path / "saved") == losses(tmp_path / "own")
  assert len(losses(tmp_path / "own")) == 3


@pytest.fixture
def every_program_cached(tmp_path):
  before = {name: getattr(jax.config, name) for name in CACHE}
  for name, value in zip(CACHE, (str(tmp_path / "cache"), 0.0), strict=True):
    jax.config.update(name, value)
  compilation_cache.reset_cache()
  yield tmp_path / "cache"
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


@pytest.mark.slow
def test_a_step_that_was_compiled_before_is_saved_whole(every_program_cached, tmp_path):
  """A program from JAX's cache is serialized without its kernels."""
  for name in ("first", "again"):
    jax.clear_caches()
    assert run(*STEPS, MESH, "--mode=compile", f"--save={tmp_path}/{name}") == 0
    assert run(*STEPS, MESH, f"--job_log_dir={tmp_path}/{name} own") == 0
  assert any("train_step" in file.name for file in every_program_cached.iterdir())
  jax.clear_caches()
  assert (
    run(*STEPS, MESH, f"--compiled_step={tmp_path}/again", f"--job_log_dir={tmp_path}/run") == 0
  )
  assert losses(tmp_path / "run") == losses(tmp_path / "first own")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("flags", "says"),
  [
    ((MESH, "--fdl.LEARNING_RATE=2e-2"), "its step computes something else"),
    ((MESH, "--fdl.MAX_STEPS=30"), "its step computes something else"),
    ((MESH, "--fdl.PERCORE_BATCH_SIZE=2"), "its step takes other arrays"),
    (("--fdl.ICI_MESH_SHAPE=[8,1,1]",), "for mesh data 2, fsdp 2, tensor 2, and here it is data 8"),
  ],
)
def test_another_step_is_refused_in_one_line(step, flags, says, tmp_path, capsys):
  assert run(*STEPS, *flags, f"--compiled_step={step}", f"--job_log_dir={tmp_path}/run") == 2
  error = capsys.readouterr().err
  assert says in error and str(step) in error
  assert error.count("\n") == 1
  assert not (tmp_path / "run").exists()


def damaged(step: pathlib.Path) -> bytes:
  return step.read_bytes()[:-1000]


def of_another_jax(step: pathlib.Path) -> bytes:
  return with_header(step, "version of jax", "0.1")


def with_other_options(step: pathlib.Path) -> bytes:
  return with_header(step, "options", "")


def pickled(step: pathlib.Path) -> bytes:
  """A payload that leaves a trace if it is unpickled, and the digest of it."""
  payload = pickle.dumps(Trap(step.parent / "trace"))
  rest = with_header(step, "payload", hashlib.sha256(payload).hexdigest()).partition(b"\n")
  return rest[0] + b"\n" + payload


class Trap:
  def __init__(self, trace: pathlib.Path):
    self.trace = trace

  def __reduce__(self):
    return (pathlib.Path.touch, (self.trace,))


def pickled_before(step: pathlib.Path) -> bytes:
  return pickled(step).replace(b"paxlike step 2", b"paxlike step 1", 1)


def a_pickle(step: pathlib.Path) -> bytes:
  return pickle.dumps(Trap(step.parent / "trace"))


def with_a_bit_flipped(step: pathlib.Path) -> bytes:
  contents = bytearray(step.read_bytes())
  contents[len(contents) // 2] ^= 1
  return bytes(contents)


def with_half_a_program(step: pathlib.Path) -> bytes:
  payload = step.read_bytes().partition(b"\n")[2]
  payload = payload[: len(payload) // 2]
  line = with_header(step, "payload", hashlib.sha256(payload).hexdigest()).partition(b"\n")[0]
  return line + b"\n" + payload


def with_header(step: pathlib.Path, name: str, value: str) -> bytes:
  line, _, rest = step.read_bytes().partition(b"\n")
  return json.dumps(json.loads(line) | {name: value}).encode() + b"\n" + rest


@pytest.mark.slow
@pytest.mark.parametrize(
  ("change", "says"),
  [
    (damaged, "is damaged"),
    (of_another_jax, "compiled for version of jax 0.1, and here it is"),
    (with_other_options, "compiled with other options of XLA"),
    (lambda step: with_header(step, "version of jax", "\n\x1b[31m" * 1000), "jax ??[31m??[31m"),
    (lambda step: with_header(step, "x", "x" * 2**20), "was not written by"),
    (lambda step: b"[" * 10**6, "was not written by"),
    (lambda step: b"{" * 100 + b"\n", "was not written by"),
    (with_a_bit_flipped, "is damaged"),
    (with_half_a_program, "deserialization failed"),
    (pickled, "Failed to parse"),
    (pickled_before, "of an older paxlike, whose files are pickles: compile it again"),
    (a_pickle, "was not written by"),
    (lambda step: b"text", "was not written by --mode=compile --save=FILE"),
    (lambda step: None, "No such file"),
  ],
)
def test_a_file_that_does_not_serve_is_told(step, change, says, tmp_path, capsys):
  path = tmp_path / "other.bin"
  if (contents := change(step)) is not None:
    path.write_bytes(contents)
  assert run(*STEPS, MESH, f"--compiled_step={path}", f"--job_log_dir={tmp_path}/run") == 2
  error = capsys.readouterr().err
  assert says in error
  assert error.count("\n") == 1 and len(error) < 500
  assert not (step.parent / "trace").exists() and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_pipe_is_not_waited_for(tmp_path, capsys):
  os.mkfifo(tmp_path / "pipe")
  assert run(*STEPS, f"--compiled_step={tmp_path}/pipe", f"--job_log_dir={tmp_path}/run") == 2
  assert "is a pipe or a device" in capsys.readouterr().err


def of_no_function(*args):
  """Stands for what an unknown JAX has in the place of the function that compiles."""


@pytest.mark.parametrize("function", [None, of_no_function])
def test_a_jax_that_loads_programs_otherwise_is_told(function, monkeypatch):
  compiler = importlib.import_module("jax._src.compiler")
  if function is None:
    monkeypatch.delattr(compiler, "compile_or_get_cached")
  else:
    monkeypatch.setattr(compiler, "compile_or_get_cached", function)
  with pytest.raises(UserError, match="loads programs differently"), saved_step._as_compiled(b""):
    pass


def test_a_program_that_jax_does_not_ask_for_is_told():
  with pytest.raises(UserError, match="loads programs differently"), saved_step._as_compiled(b""):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--mode=compile --save=", "--compiled_step="])
def test_steps_of_several_cpu_processes_are_refused(tmp_path, flag):
  """XLA would run their collectives in any order, and so take one's value for another's."""
  *mode, file = flag.split()
  assert run(*STEPS, "--mode=compile", f"--save={tmp_path}/step.bin") == 0
  address, folder = f"--server_addr=localhost:{port()}", f"--job_log_dir={tmp_path}/run"
  processes = [
    start(
      *(*STEPS, *mode, f"{file}{tmp_path}/step.bin", *(() if mode else (folder,))),
      *("--num_cpu_devices=1", "--fdl.ICI_MESH_SHAPE=[1,1,1]", "--fdl.DCN_MESH_SHAPE=[1,2,1]"),
      *(address, "--num_hosts=2", f"--host_idx={number}"),
    )
    for number in range(2)
  ]
  ended = [finish(process) for process in processes]
  assert [status for status, _, _ in ended] == [2, 2], ended
  assert "does not keep the order of collectives" in ended[0][2]


def port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def test_what_cannot_be_written_is_told(tmp_path, capsys):
  assert run(*STEPS, "--mode=compile", f"--save={tmp_path}/missing/step.bin") == 2
  assert f"there is no folder {tmp_path}/missing" in capsys.readouterr().err
  (tmp_path / "step.bin").mkdir()
  assert run(*STEPS, "--mode=compile", f"--save={tmp_path}/step.bin") == 2
  assert "step.bin is a folder" in capsys.readouterr().err
  os.mkfifo(tmp_path / "pipe")
  for name, says in (
    (".", "is a folder"),
    ("/", "is a folder"),
    ("", "non-empty"),
    ("a" * 300, ""),
  ):
    assert run(*STEPS, "--mode=compile", f"--save={name}") == 2
    err = capsys.readouterr().err
    assert err.startswith(f"paxlike: --save={name}") and says in err and err.count("\n") == 1
  assert run(*STEPS, "--mode=compile", f"--save={tmp_path}/pipe") == 2
  assert "is a pipe or a device" in capsys.readouterr().err
  assert {file.name for file in tmp_path.iterdir()} == {"pipe", "step.bin"}


def test_the_flags_go_with_their_modes(capsys):
  assert run(*STEPS, "--mode=show", "--save=x") == 2
  assert "--save goes with --mode=compile" in capsys.readouterr().err
