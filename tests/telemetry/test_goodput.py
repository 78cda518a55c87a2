# SPDX-License-Identifier: Apache-2.0
import json
import random
import time

import pytest
from helpers.program import TINY, finish, run, start

from paxlike.checkpoints.run_checkpoints import Checkpoints
from paxlike.processes import phases
from paxlike.telemetry import goodput


def simulate(folder, seed: int) -> dict[str, float]:
  """Writes the ledger of a run that is killed at random; returns the seconds of each category."""
  rng = random.Random(seed)
  clock, saved = [0.0], [0]
  spent: list[tuple[str, int, float, int]] = []  # Category, attempt, seconds, update computed.
  starts = []
  for attempt in range(rng.randint(1, 5)):
    began, resumed = clock[0], rng.choice(saved[-2:])  # Perhaps the newest checkpoint is damaged.
    saved = [step for step in saved if step <= resumed]
    starts.append(resumed)
    seconds = dict.fromkeys(goodput.CATEGORIES, 0.0)
    lines = []

    def pass_time(category, updates, *, attempt=attempt, seconds=seconds):
      took = rng.uniform(0.1, 3)
      clock[0] += took
      seconds[category] += took
      spent.append((category, attempt, took, updates))

    def write(updates, *, seconds=seconds, lines=lines):
      lines.append({"time": clock[0], "updates": updates, "seconds": dict(seconds)})

    pass_time("start_up", 0)
    if rng.random() < 0.2:
      write(None)  # Killed while it restores.
      starts[-1] = 10**9
    else:
      write(resumed)
      for step in range(resumed, resumed + rng.randint(1, 9)):
        pass_time("data_wait", step + 1)
        pass_time("step", step + 1)
        if rng.random() < 0.4:
          write(step + 1)
          saved.append(step + 1)
          pass_time("save", step + 1)
      write(step + 1)
    assert sum(seconds.values()) == pytest.approx(clock[0] - began)
    path = folder / "goodput" / f"attempt_{attempt:08d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    pause = rng.uniform(0, 5)
    clock[0] += pause
    spent.append(("down", attempt, pause, 0))
  expected = dict.fromkeys(goodput.CATEGORIES, 0.0)
  for category, attempt, took, updates in spent[:-1]:
    again = category in ("step", "data_wait") and updates > min(starts[attempt + 1 :], default=1e9)
    expected["lost" if again else category] += took
  return expected


@pytest.mark.parametrize("seed", range(40))
def test_every_second_is_counted_once_and_recomputed_steps_are_lost(tmp_path, seed):
  expected = simulate(tmp_path, seed)
  found = goodput.summary(tmp_path)
  assert found is not None
  assert found.seconds == pytest.approx(expected, abs=1e-9)
  assert found.share == pytest.approx(expected["step"] / sum(expected.values()))


def test_damaged_lines_are_skipped(tmp_path):
  assert goodput.summary(tmp_path) is None
  simulate(tmp_path, 1)
  before = goodput.summary(tmp_path)
  file = tmp_path / "goodput" / "attempt_00000000.jsonl"
  file.write_text(f'{file.read_text()}{{"time": 1, "up\n[]\n{{"time": "x"}}\n')
  assert goodput.summary(tmp_path) == before


@pytest.mark.slow
def test_the_seconds_of_a_killed_run_add_up_to_its_wall_time(tmp_path):
  """Two kills after a checkpoint, then a complete run; the clock of this process counts too."""
  flags = (*TINY, "--fdl.CHECKPOINT_EVERY_N_STEPS=50", f"--job_log_dir={tmp_path}")
  began = None
  for killed in (True, True, False):
    newest = Checkpoints(tmp_path / "checkpoints", keep=None).latest() or 0
    began = began or time.time()
    steps = f"--fdl.MAX_STEPS={10**6 if killed else newest + 70}"
    process = start(*flags, steps, signalled=True)
    while killed and (Checkpoints(tmp_path / "checkpoints", keep=None).latest() or 0) <= newest:
      assert process.poll() is None
      time.sleep(0.1)
    if killed:
      process.kill()
    status, out, err = finish(process)
    assert status == (-9 if killed else 0), err
  assert began is not None
  wall = max(file.stat().st_mtime for file in (tmp_path / "goodput").iterdir()) - began
  found = goodput.summary(tmp_path)
  assert found is not None and found.attempts == 3
  assert found.wall == pytest.approx(wall, rel=0.01)
  assert "goodput: " in out and "in 3 recorded starts: " in out and "not running " in out
  spent = found.seconds
  assert min(spent.values()) >= 0
  assert spent["start_up"] > 1 and spent["step"] > 0 and spent["restore"] > 0


def test_files_of_other_names_and_many_checkpoints_change_nothing(tmp_path, monkeypatch):
  monkeypatch.setattr(goodput, "_MARKS", 3)
  path = tmp_path / "goodput"
  simulate(tmp_path, 2)
  (path / "attempt_0000000x.jsonl").write_text("{}")
  before = goodput.summary(tmp_path)
  assert before is not None
  ledger = goodput.Ledger(tmp_path)
  for step in range(9):
    ledger.mark(step)
  ledger.close()
  newest = sorted(path.glob("attempt_*[0-9].jsonl"))[-1].read_text().splitlines()
  assert [json.loads(line)["updates"] for line in newest] == [0, 6, 7, 8, 8]
  after = goodput.summary(tmp_path)
  assert after is not None and after.attempts == before.attempts + 1


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_spends_no_time_unless_it_trains_on(tmp_path):
  flags = (*TINY, f"--job_log_dir={tmp_path}")
  assert run(*flags, "--fdl.MAX_STEPS=2") == 0
  first = goodput.summary(tmp_path)
  for steps in (2, 1):  # All steps are complete; the checkpoint is beyond the last step.
    assert run(*flags, f"--fdl.MAX_STEPS={steps}") == 0
    assert goodput.summary(tmp_path) == first
  path = tmp_path / "goodput" / "attempt_00000000.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["finished"] for line in lines][-1] and not lines[0]["finished"]
  path.write_text("".join(json.dumps({**one, "time": one["time"] - 1e6}) + "\n" for one in lines))
  assert run(*flags, "--fdl.MAX_STEPS=3") == 0
  found = goodput.summary(tmp_path)
  assert found is not None and found.attempts == 2 and found.seconds["down"] == 0


def test_the_time_of_steps_that_are_thrown_away_is_that_of_starting():
  progress = phases.Progress()
  progress.enter("step", 0)
  progress.count_as_start()
  progress.enter("restore")
  assert set(progress.seconds()) == {"start", "restore"}
