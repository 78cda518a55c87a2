# SPDX-License-Identifier: Apache-2.0
"""Laws of trackers: each has every record once, whatever fails, and none delays the run."""

import contextlib
import functools
import random
import threading
import time
from typing import Any

import pytest
from etils import epath

from paxlike.telemetry import metric_files
from paxlike.telemetry.trackers import background, provenance, recorder, registry
from paxlike.telemetry.trackers.tracker import Record, Tracker, newest

HEADER: Any = None


class Server:
  """What outlives a process; it answers the newest one."""

  def __init__(self):
    self.lock = threading.Lock()
    self.process = 0
    self.records: list[Record] = []
    self.opened: list[str] = []
    self.ended: list[str] = []
    self.is_down = threading.Event()
    self.delay = 0.0


@pytest.fixture
def server(monkeypatch):
  """A server whose tracker is named "test"; a tracker that fails is tried again at once."""
  made = Server()

  class Client(Tracker):
    def __init__(self):
      self.process = made.process

    def open(self, run):
      with self.asking():
        made.opened.append(run.id)
        return newest({name: value for one in made.records for name, value in one.named().items()})

    def write(self, record):
      with self.asking():
        made.records.append(record)

    def close(self, status):
      with self.asking():
        made.ended.append(status)

    @contextlib.contextmanager
    def asking(self):
      time.sleep(made.delay)
      with made.lock:
        if made.is_down.is_set() or self.process != made.process:
          raise ConnectionError("no route to host")
        yield

  monkeypatch.setitem(registry.TRACKERS, "test", Client)
  monkeypatch.setattr(provenance, "facts", lambda header: {})
  monkeypatch.setattr(background, "_RETRY", 0.01)
  return made


class Training:
  """A start of a run, which has a record each step, and an evaluation every third."""

  def __init__(self, folder, *, step: int, names=("test",)):
    self.step = step
    self.lines: list[str] = []
    self.recorder = recorder.Recorder(epath.Path(folder), recorder.Tracking(names=names))
    self.recorder.start(HEADER, {}, step=step)

  def until(self, step: int) -> "Training":
    for updates in range(self.step + 1, step + 1):
      record = {"step": updates, "updates": updates, "time": 0.0, "loss": 1 / updates}
      self.recorder.write({"kind": "train", **record})
      if updates % 3 == 0:
        self.recorder.write({"kind": "eval", "set": "held", **record})
    self.step = step
    return self

  def kill(self, server: Server):
    """Loses what the tracker's thread has not sent."""
    with server.lock:
      server.process += 1
    for tracker in self.recorder._in_folder:
      tracker.close("failed")  # It has no buffer.

  def end(self, status: str = "finished"):
    self.recorder.close(status)
    self.lines += self.recorder.lines()


def wait_until(condition):
  deadline = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.002)


def keys(records) -> list[tuple[str, int]]:
  return [(record.part, record.updates) for record in records]


def expected(step: int) -> list[tuple[str, int]]:
  """The records of a run up to a step."""
  found = []
  for updates in range(1, step + 1):
    found += [("train", updates)] + ([] if updates % 3 else [("eval_held", updates)])
  return found


def recorded(folder) -> list[tuple[str, int]]:
  return keys(map(Record.of, metric_files.records(epath.Path(folder))))


def has_all(server: Server, records: list[tuple[str, int]]) -> bool:
  return set(records) <= {*keys(server.records)}


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_is_killed_and_resumed_is_one_run_with_each_record_once(server, tmp_path, seed):
  rng = random.Random(seed)
  step = 0
  for _ in range(4):
    start = Training(tmp_path, step=step).until(step + rng.randint(1, 9))
    wait_until(lambda: server.opened)
    if rng.random() < 0.5:
      wait_until(functools.partial(has_all, server, expected(start.step)))
    start.kill(server)
    step = rng.randint(step, start.step)  # The newest checkpoint.
  Training(tmp_path, step=step).until(40).end()
  assert keys(server.records) == expected(40) == recorded(tmp_path)
  assert len(set(server.opened)) == 1 and server.ended[-1] == "finished"


def test_a_tracker_that_is_chosen_later_gets_the_records_before(server, tmp_path):
  Training(tmp_path, step=0, names=()).until(5).end("stopped")
  assert not (tmp_path / provenance.FILE).exists()
  Training(tmp_path, step=5).until(8).end()
  assert keys(server.records) == expected(8)


def test_an_outage_is_one_line_and_ends_with_all_records(server, tmp_path):
  training = Training(tmp_path, step=0).until(3)
  wait_until(lambda: has_all(server, expected(3)))
  server.is_down.set()
  training.until(6)
  (tracker,) = training.recorder._background
  wait_until(lambda: tracker._wait > 5 * background._RETRY)
  assert keys(server.records) == expected(3)
  server.is_down.clear()
  wait_until(lambda: has_all(server, expected(6)))
  training.until(9).end()
  assert tracker._wait == background._RETRY  # The next outage begins like the first.
  assert keys(server.records) == expected(9) and len(set(server.opened)) == 1
  assert [line.split(". ")[0] for line in training.lines] == [
    "tracker test failed: ConnectionError: no route to host"
  ]


@pytest.mark.parametrize("most", [2, 5])
def test_a_long_outage_keeps_few_records_and_loses_none(server, tmp_path, monkeypatch, most):
  monkeypatch.setattr(background, "_MOST_ITEMS", most)
  for step in (0, 40):
    server.is_down.set()
    training = Training(tmp_path, step=step).until(step + 20)
    assert len(training.recorder._background[0]._items) <= most
    server.is_down.clear()
    server.delay = 0.001  # Slower than training.
    training.until(step + 40).end()
    assert keys(server.records) == expected(step + 40)


def test_a_run_ends_without_its_tracker_and_says_so(server, tmp_path):
  server.is_down.set()
  training = Training(tmp_path, step=0).until(3)
  training.end()
  assert "test: some records were not sent (ConnectionError: no route" in training.lines[-1]
  assert not server.records
  assert recorded(tmp_path) == expected(3)
  server.is_down.clear()
  Training(tmp_path, step=3).end()  # The same command again, with nothing left to train.
  assert keys(server.records) == expected(3)


def test_no_step_waits_for_a_tracker(server, tmp_path, monkeypatch):
  monkeypatch.setattr(recorder, "_END_SECONDS", 0.1)
  server.delay = 0.5
  began = time.monotonic()
  training = Training(tmp_path, step=0).until(300)
  assert time.monotonic() - began < 0.4
  training.end()
  assert "some records were not sent (it takes too long)" in training.lines[-1]


def test_a_failure_in_the_folder_ends_the_run(server, tmp_path, monkeypatch):
  def full(*unused):
    raise OSError("No space left on device")

  training = Training(tmp_path, step=0)
  monkeypatch.setattr(metric_files.JsonlWriter, "write", full)
  with pytest.raises(OSError, match="No space"):
    training.until(1)
  training.end("failed")
  assert not server.records and server.ended == ["failed"]
