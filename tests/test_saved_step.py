# SPDX-License-Identifier: Apache-2.0
"""Steps that are compiled in one process and run in another."""

import json
import pathlib
import types

import pytest
from program import TINY, run

from paxlike import saved_step

STEPS = (*TINY, "--fdl.MAX_STEPS=3")
MESH = "--fdl.ICI_MESH_SHAPE=[2,2,2]"


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
    (lambda step: b"text", "is no file that --mode=compile --save=FILE wrote"),
    (lambda step: None, "No such file"),
  ],
)
def test_a_file_that_does_not_serve_is_told(step, change, says, tmp_path, capsys):
  path = tmp_path / "other.bin"
  if (contents := change(step)) is not None:
    path.write_bytes(contents)
  assert run(*STEPS, MESH, f"--compiled_step={path}", f"--job_log_dir={tmp_path}/run") == 2
  assert says in capsys.readouterr().err


def test_what_cannot_be_written_is_told(tmp_path, capsys):
  assert run(*STEPS, "--mode=compile", f"--save={tmp_path}/missing/step.bin") == 2
  assert f"there is no folder {tmp_path}/missing" in capsys.readouterr().err
  (tmp_path / "step.bin").mkdir()
  assert run(*STEPS, "--mode=compile", f"--save={tmp_path}/step.bin") == 2
  assert "step.bin is a directory" in capsys.readouterr().err
  assert [file.name for file in tmp_path.iterdir()] == ["step.bin"]


def test_the_flags_go_with_their_modes(capsys):
  assert run(*STEPS, "--mode=show", "--save=x") == 2
  assert "--save goes with --mode=compile" in capsys.readouterr().err
