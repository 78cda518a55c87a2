# SPDX-License-Identifier: Apache-2.0
"""The steps that PROFILE_STEPS names are profiled, and no others."""

import contextlib
import ctypes
import socket
from typing import Any

import jax
import pytest
from helpers.program import TINY, curve, run

from paxlike.errors import UserError
from paxlike.telemetry import goodput
from paxlike.training import cuda_profiler, profiler
from paxlike.training.profiler import Profiler, Profiling


def traced_steps(folder) -> list[int]:
  """Returns the steps that a trace marks."""
  (file,) = (folder / "profile" / "plugins" / "profile").glob("*/*.xplane.pb")
  kind: Any = jax.profiler.ProfileData
  plane = kind.from_file(str(file)).find_plane_with_name("/host:CPU")
  events = [event for line in plane.lines for event in line.events if event.name == "train"]
  return [dict(event.stats)["step_num"] for event in sorted(events, key=lambda e: e.start_ns)]


@pytest.mark.slow
def test_a_window_of_steps_is_traced(tmp_path, capsys):
  flags = (*TINY, "--fdl.MAX_STEPS=6", f"--job_log_dir={tmp_path}")
  assert run(*flags, "--fdl.PROFILE_STEPS=[2,3]") == 0
  assert traced_steps(tmp_path) == [2, 3]
  out = capsys.readouterr().out
  assert "profiling steps 2 to 3" in out
  assert f"xprof --logdir={tmp_path}/profile" in out
  assert [step for step, _ in curve(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_window_that_the_end_cuts_short_is_kept(tmp_path, capsys):
  flags = (*TINY, "--fdl.MAX_STEPS=2", f"--job_log_dir={tmp_path}")
  assert run(*flags, "--fdl.PROFILE_STEPS=[1,9]", "--fdl.SUMMARY_INTERVAL_STEPS=1") == 0
  assert traced_steps(tmp_path) == [1]
  assert "completed step: 1, seconds: " in (out := capsys.readouterr().out)
  assert "(with the profiler's start)" in out
  spent = goodput.summary(tmp_path)
  assert spent is not None and spent.seconds["profile"] > 0


@pytest.mark.parametrize("process", [0, 1])
def test_all_processes_pause_for_the_profiler_of_process_0(process, monkeypatch, tmp_path):
  """A watch needs all processes to enter the same phases."""
  monkeypatch.setattr(jax, "process_index", lambda: process)
  monkeypatch.setattr(profiler, "trace", lambda folder: contextlib.nullcontext(traced.append(1)))
  traced: list[int] = []
  with Profiler(Profiling(steps=(1, 2)), tmp_path, lambda line: None, num_steps=9) as one:
    changes = []
    for step in range(5):
      changes.append(one.change(step))
      one.update(step)
  assert changes == [None, "start", None, "end", None]
  assert len(traced) == (process == 0)


def test_processes_of_a_host_keep_their_traces_apart(monkeypatch, tmp_path):
  assert profiler.trace_folder(tmp_path) == tmp_path / "profile"
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  assert profiler.trace_folder(tmp_path) == tmp_path / "profile" / "process_1"


def test_a_port_is_open_while_the_run_lasts(tmp_path):
  with socket.socket() as free:
    free.bind(("", 0))
    port = free.getsockname()[1]
  notes: list[str] = []
  how = Profiling(port=port)
  with Profiler(how, tmp_path, notes.append, num_steps=9):
    socket.create_connection(("localhost", port), timeout=10).close()
    with pytest.raises(UserError, match=f"PROFILER_PORT={port}: Address already in use"):
      Profiler(how, tmp_path, notes.append, num_steps=9).__enter__()
  assert notes == [f"xprof can take a trace at port {port}"]
  with pytest.raises(OSError):
    socket.create_connection(("localhost", port), timeout=10)


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    (["--fdl.PROFILE_STEPS=[5]"], "--fdl.PROFILE_STEPS=[5]: expected a list of 2 items"),
    (["--fdl.PROFILE_STEPS=[3,2]"], "PROFILE_STEPS=[3,2]: the last step is before the first."),
    (["--fdl.PROFILE_STEPS=[6,7]"], "PROFILE_STEPS=[6,7]: the run has 6 steps, of which the last"),
    (["--fdl.PROFILE_STEPS=[1,2]", "--fdl.PROFILER=nsys"], "PROFILER=nsys records NVIDIA GPUs"),
    (["--fdl.PROFILER=nsys"], "as they are: PROFILE_STEPS=[1,2] would give it one."),
    (
      ["--compiled_step=F", "--fdl.LOG_LAYERS_EVERY=1"],
      "--compiled_step=F has no effect with LOG_LAYERS_EVERY=1: every step logs layers",
    ),
    (
      ["--pgle_profile=p.pbtxt", "--fdl.LOG_LAYERS_EVERY=1"],
      "--pgle_profile=p.pbtxt has no effect with LOG_LAYERS_EVERY=1",
    ),
    (["--pgle_profile=p.pbtxt"], "--pgle_profile=p.pbtxt is for GPUs"),
  ],
)
def test_what_cannot_be_profiled_is_refused(flags, message, tmp_path, capsys):
  folder = tmp_path / "run"
  assert run(*TINY, "--fdl.MAX_STEPS=6", f"--job_log_dir={folder}", *flags) == 2
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert message in line
  assert not folder.exists()


def test_the_libraries_of_nvidia_are_found_and_called():
  """Those of the wheels. Ranges of NVTX do nothing without nsys; CUDA says that there is no GPU."""
  if cuda_profiler._nvtx() is None:
    pytest.skip("NVIDIA's wheels are not installed")
  with cuda_profiler.named("train 5"), cuda_profiler.named("inner"):
    pass
  assert cuda_profiler._nvtx().nvtxRangePop() < 0  # Each range was ended.
  Profiling(steps=(1, 2), profiler="nsys").check(num_steps=5, platform="cuda")
  count = ctypes.c_int()
  if cuda_profiler._cuda().cudaGetDeviceCount(ctypes.byref(count)):
    message = r"PROFILER=nsys: cudaProfilerStart failed: .* \(CUDA error \d+\)\."
    with pytest.raises(UserError, match=message), cuda_profiler.range_of_capture():
      pass


def test_a_folder_that_cannot_be_written_is_a_mistake(tmp_path):
  (tmp_path / "profile").write_text("")
  with (
    pytest.raises(UserError, match="profile: cannot profile"),
    profiler.trace(tmp_path / "profile"),
  ):
    pass


def test_a_run_that_resumes_after_the_window_says_so_once(tmp_path):
  notes: list[str] = []
  with Profiler(Profiling(steps=(2, 3)), tmp_path, notes.append, num_steps=9) as one:
    for step in (5, 6):
      one.update(step)
  assert notes == ["PROFILE_STEPS=[2,3] is before step 5: nothing is profiled"]
