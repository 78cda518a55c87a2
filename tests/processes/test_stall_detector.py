# SPDX-License-Identifier: Apache-2.0
"""A process is stuck if its phase takes too long, and a run of it ends and says so."""

import contextlib
import json
import pathlib
import signal
import time

import pytest
from helpers.program import TEXT, TINY, finish, start

from paxlike.processes import phases, stall_detector


@pytest.fixture
def times(monkeypatch):
  """The phases of a process that has entered none; time goes as the test says."""
  now = [0.0]
  monkeypatch.setattr(time, "monotonic", lambda: now[0])
  own = phases.Progress()

  def go(kind: str, seconds: float):
    own.enter(kind)
    now[0] += seconds

  return own, go


def test_a_limit_follows_from_the_times_so_far(times):
  own, go = times
  assert own.limit("step", None) == phases.UNMEASURED
  for _ in range(3):
    go("data", 0.01)
    go("step", 2.0)
  go("data", 0)
  assert own.limit("step", None) == phases.FLOOR
  assert own.limit("data", None) == phases.FLOOR
  for _ in range(9):
    go("data", 0.01)
    go("step", 10.0)
  go("data", 0)
  assert own.limit("step", None) == 200
  go("data", 100)  # As at the end of an epoch.
  go("step", 0)
  assert own.limit("data", None) == pytest.approx(300)
  for _ in range(4):
    go("save", 0.1)
  assert own.limit("save", None) == phases.FLOOR_OF_BYTES


def test_who_is_asked_to_stop_has_three_whole_steps(times, monkeypatch):
  """Not three times that for which the devices are waited for; as much as to compile at first."""
  own, go = times
  monkeypatch.setattr(phases, "OWN", own)

  def grace() -> float | None:
    return stall_detector.limit_of("data", 1000.0, must_stop=True)

  go("data", 23)
  go("step", 0.1)
  assert grace() == 300
  for _ in range(3):
    go("data", 23)
    go("step", 0.1)
  assert grace() == pytest.approx(3 * 23.1)
  for _ in range(9):
    go("data", 0.1)
    go("step", 0.1)
  assert grace() == 20
  for kind in ("compile", "init"):
    assert stall_detector.limit_of(kind, None, must_stop=True) == 300


@pytest.mark.parametrize("kind", phases.KINDS)
def test_a_limit_that_is_given_holds_for_all(times, kind):
  own, _ = times
  assert own.limit(kind, 7.0) == (None if kind in ("poll", "listen") else 7)
  assert own.limit(kind, 0.0) is None
  limited = ("restore", "data", "dispatch", "step", "eval", "decode", "sample", "save", "profile")
  assert (own.limit(kind, None) is None) == (kind not in limited)


SHORT = ("--fdl.MAX_STEPS=100000", "--fdl.EVAL_INTERVAL_STEPS=0", "--fdl.LR_SCHEDULE=constant")


def until_still(folder: pathlib.Path):
  """Returns when a run writes nothing any more."""
  size, metrics = -1, folder / "run" / "metrics.jsonl"
  while size != (size := metrics.stat().st_size):
    time.sleep(2)


@contextlib.contextmanager
def stuck(folder: pathlib.Path, words: str, *flags: str):
  """Gives a process once it is to get stuck in its second step or later; kills what is left."""
  (folder / "a.txt").write_text(" ".join(map(str, range(500))))
  text = [flag for flag in TEXT if "LR_COS" not in flag]
  flags = (*text, *SHORT, f"--fdl.DATA_PATH={folder}/a.txt", f"--job_log_dir={folder}/run", *flags)
  process = start(*flags, fault=folder / "fault")
  metrics = folder / "run" / "metrics.jsonl"
  while not metrics.exists() or not metrics.read_text():
    assert process.poll() is None, finish(process)
    time.sleep(0.05)
  (folder / "fault").write_text(words)
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_process_asleep_in_its_data_ends_and_says_so(tmp_path):
  with stuck(tmp_path, "data") as process:
    process.send_signal(signal.SIGUSR1)  # Stacks now; it changes nothing else.
    status, _, err = finish(process)
  assert status == 75
  assert "paxlike: this process (on " in err and ") is stuck: waiting for data of step " in err
  assert "paxlike: wrote the stacks of all threads: " in err and "Current thread" in err
  written = sorted((tmp_path / "run" / "stacks").iterdir())
  assert len(written) == 2
  assert "why: asked for by SIGUSR1" in written[0].read_text()
  text = written[1].read_text()
  assert "now: waiting for data of step" in text and "faulty.py" in text
  told = json.loads((tmp_path / "run" / "status.json").read_text())
  assert told["state"] == "stalled" and "waiting for data" in told["reason"]


@pytest.mark.slow
def test_an_evaluation_that_is_stuck_says_nothing_of_the_run_that_is_trained(tmp_path):
  (tmp_path / "a.txt").write_text(" ".join(map(str, range(500))))
  flags = (*TEXT, f"--fdl.DATA_PATH={tmp_path}/a.txt", f"--job_log_dir={tmp_path}/run")
  assert finish(start(*flags, "--fdl.MAX_STEPS=1"))[0] == 0
  status = json.dumps({"state": "running", "host": "elsewhere", "pid": 7})
  (tmp_path / "run" / "status.json").write_text(status)
  (tmp_path / "fault").write_text("eval")
  returncode, _, err = finish(start(*flags, "--mode=eval", fault=tmp_path / "fault"))
  assert returncode == 75 and "is stuck: evaluating " in err
  assert "If started again, the job may succeed" in err
  assert (tmp_path / "run" / "status.json").read_text() == status


@pytest.mark.slow
def test_sigterm_ends_a_process_that_is_stuck(tmp_path):
  knobs = ("--fdl.STALL_TIMEOUT=0", "--fdl.STACK_TRACE_INTERVAL=1")
  with stuck(tmp_path, "data patient", *knobs) as process:
    until_still(tmp_path)
    process.terminate()
    status, _, err = finish(process)
  assert status == 75
  periodic = sorted((tmp_path / "run" / "stacks").glob("periodic_*"))
  assert periodic and "faulty.py" in periodic[-1].read_text()
  assert "is stuck and was asked to stop: waiting for data of step " in err


@pytest.mark.slow
def test_a_process_that_keeps_the_interpreters_lock_ends_all_the_same(tmp_path):
  with stuck(tmp_path, "data locked") as process:
    status, _, err = finish(process)
  assert status == -signal.SIGALRM
  assert "paxlike: this process (on " in err and "no Python code runs" in err
  assert "Current thread" in err and "faulty.py" in err


@pytest.mark.slow
def test_output_that_nobody_reads_ends_a_run_as_stuck(tmp_path):
  """As `less` that shows its first page: what is said of it waits for nobody."""
  steps = ("--fdl.MAX_STEPS=100000", "--fdl.STALL_TIMEOUT=40", f"--job_log_dir={tmp_path}/run")
  process = start(*TINY, *steps, redirected="2>&1")
  assert process.wait(200) == 75
  told = json.loads((tmp_path / "run" / "status.json").read_text())
  assert told["state"] == "stalled" and "waiting for a reader of its output" in told["reason"]
  process.communicate()
