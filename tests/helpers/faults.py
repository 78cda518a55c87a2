# SPDX-License-Identifier: Apache-2.0
"""Does harm to the processes of a job at random, restarts it each time, and counts what follows.

    PYTHONPATH=tests python -m helpers.faults [--faults=200] [--processes=2,4] [--seed=0]
        [--kinds=kill,stop,...]

Each fault is that of one process: killed or suspended, at the start or later; SIGTERM; stuck in its
data, an evaluation, a save or a compilation; never there; there twice. The table says how many jobs
ended in time, how many in each of whose processes a `paxlike:` line named the culprit, of how many
`status.json` was right, and how many were resumed from the newest checkpoint. At the end the losses
of all steps are compared with those of a job without faults. A process that gets stuck may be so
for five seconds (faulty.py). Ends with status 1 if anything is not as it should be.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from helpers import faulty
from helpers.program import TEXT, curve, start
from paxlike.checkpoints.run_checkpoints import Checkpoints

STUCK = ("data", "eval", "save", "compile")
KINDS = ("kill", "stop", "term", *STUCK, "never", "twice")
# How status.json ends; a fault at the start may leave that of the run before.
STATES = {"kill": "lost", "stop": "lost", "term": "stopped", "twice": "stopped"}
# Of JAX and XLA, where they end a process themselves.
ABORTS = re.compile(r"Check failure stack trace|Fatal Python error|terminate called|\*\*\* SIG")


class Times(NamedTuple):
  """Seconds of the time-outs of a job, and how much longer the machine may take."""

  heartbeat: int
  join: int
  slack: int


class Ended(NamedTuple):
  """What became of one fault."""

  in_time: bool
  named: bool
  status: bool
  resumed: bool | None  # None: the job did not get so far.
  seconds: float
  note: str


def free_port() -> int:
  """Returns a port that nobody listens on."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


class Job:
  """Processes of one device each that train on a text."""

  def __init__(self, folder: pathlib.Path, *, count: int, times: Times, max_steps: int = 10**6):
    self.folder, self.count = folder / "run", count
    self.faults = [folder / f"fault{index}" for index in range(count)]
    self._logs = [folder / f"log{index}" for index in range(count + 1)]
    flags = [flag for flag in TEXT if "LR_COS" not in flag and "PERCORE" not in flag]
    self._flags = [
      *flags,
      "--fdl.LR_SCHEDULE=constant",
      f"--fdl.PERCORE_BATCH_SIZE={4 / count}",
      "--fdl.ICI_MESH_SHAPE=[1,1,1]",
      f"--fdl.DCN_MESH_SHAPE=[1,{count},1]",
      f"--fdl.MAX_STEPS={max_steps}",
      "--fdl.CHECKPOINT_EVERY_N_STEPS=5",
      "--fdl.CHECKPOINT_MAX_TO_KEEP=3",
      "--fdl.EVAL_INTERVAL_STEPS=5",
      f"--fdl.DATA_PATH={folder}/a.txt",
      f"--heartbeat_timeout={times.heartbeat}",
      f"--join_timeout={times.join}",
      f"--server_addr=localhost:{free_port()}",
      f"--num_hosts={count}",
      f"--job_log_dir={self.folder}",
    ]
    text = " ".join(map(str, range(2000)))
    if not (folder / "a.txt").exists():
      (folder / "a.txt").write_text(text)
    self.processes: dict[int, subprocess.Popen] = {}

  def start(self, *, without: int | None = None):
    """Starts all processes, or all but one."""
    for log in self._logs:
      log.unlink(missing_ok=True)
    for fault in self.faults:
      fault.unlink(missing_ok=True)
      fault.with_name(f"{fault.name}.stuck").unlink(missing_ok=True)
    for index in range(self.count):
      if index != without:
        self.processes[index] = self.another(index)

  def another(self, index: int, log: int | None = None) -> subprocess.Popen:
    """Starts one process."""
    fault = self.faults[index]
    path = self._logs[index if log is None else log]
    return start(*self._flags, f"--host_idx={index}", fault=fault, log=path)

  def log(self, index: int) -> str:
    """What a process has printed."""
    path = self._logs[index]
    return path.read_text(errors="replace") if path.exists() else ""

  def newest(self) -> int:
    """The newest checkpoint, 0 if there is none."""
    return Checkpoints(self.folder / "checkpoints", keep=None).latest() or 0

  def state(self) -> str | None:
    """What status.json says."""
    path = self.folder / "status.json"
    return json.loads(path.read_text())["state"] if path.exists() else None

  def turned_away(self, index: int, second: subprocess.Popen, newest: int) -> subprocess.Popen:
    """Returns which of two processes of one index is not of the job: the later one to come.

    That one is rejected, or finds the job begun; the other connects to its peers by Gloo.
    """
    while self.newest() <= newest and second.poll() is None:
      if self.processes[index].poll() is not None:
        break
      time.sleep(0.1)
    if second.poll() is None and "[Gloo]" not in self.log(index):
      self.processes[index], second = second, self.processes[index]
      self._logs[index], self._logs[-1] = self._logs[-1], self._logs[index]
    return second

  def wait_for_steps(self, *, more_than: int, seconds: float) -> bool:
    """Returns whether a checkpoint comes that is newer than one, before any process ends."""
    deadline = time.monotonic() + seconds
    while self.newest() <= more_than:
      if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes.values()):
        return False
      time.sleep(0.1)
    return True

  def wait_until_stuck(self, index: int, *, seconds: float):
    """Returns when a process is stuck where its file says, or has ended."""
    deadline = time.monotonic() + seconds
    sign = self.faults[index].with_name(f"{self.faults[index].name}.stuck")
    while not sign.exists() and self.processes[index].poll() is None:
      if time.monotonic() > deadline:
        return
      time.sleep(0.1)

  def wait(self, indices: list[int], *, seconds: float) -> bool:
    """Returns whether processes end in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
      if all(self.processes[index].poll() is not None for index in indices):
        return True
      time.sleep(0.1)
    return False

  def end(self):
    """Kills what is left."""
    for process in self.processes.values():
      process.kill()
      process.wait()


def harm(job: Job, kind: str, rng: random.Random, times: Times) -> Ended:
  """Starts a job, does one fault to it, and returns what becomes of it."""
  victim = rng.randrange(job.count)
  newest = job.newest()
  at_start = kind in ("kill", "stop", "term") and rng.random() < 0.3
  job.start(without=victim if kind == "never" else None)
  try:
    return _harm(job, kind, victim, newest, rng, times, at_start=at_start)
  finally:
    job.end()


def _harm(
  job: Job,
  kind: str,
  victim: int,
  newest: int,
  rng: random.Random,
  times: Times,
  *,
  at_start: bool,
) -> Ended:
  second = None
  if kind == "compile":
    job.faults[victim].write_text(kind)
  elif kind == "twice":
    time.sleep(rng.uniform(0, 3))
    second = job.turned_away(victim, job.another(victim, log=job.count), newest)
  elif at_start:
    time.sleep(rng.uniform(0, 8))
  if kind not in ("never", "compile") and not at_start:
    if not job.wait_for_steps(more_than=newest, seconds=300 + times.slack):
      return Ended(False, False, False, False, 0, f"no step: {job.log(0)[-2000:]}")
    time.sleep(rng.uniform(0, 2))
  process = job.processes.get(victim)
  began = time.monotonic()
  if kind in STUCK:
    job.faults[victim].write_text(kind)
    job.wait_until_stuck(victim, seconds=300 + times.slack)
    began = time.monotonic()
  elif kind in ("kill", "stop", "term", "twice"):
    assert process is not None
    numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    process.send_signal(numbers.get(kind, signal.SIGTERM))
  waits = [i for i in job.processes if i != victim or kind not in ("kill", "stop")]
  seconds = {"kill": 5, "stop": times.heartbeat, "never": times.join, "twice": times.join}
  allowed = times.join if at_start else seconds.get(kind, faulty.LIMIT)
  in_time = job.wait(waits, seconds=allowed + times.slack)
  if second is not None:
    deadline = time.monotonic() + times.join + times.slack
    while second.poll() is None and time.monotonic() < deadline:
      time.sleep(0.1)
    in_time = in_time and second.poll() == (2 if second.poll() == 2 else 75)
    second.kill()
    second.wait()
  took = time.monotonic() - began
  return _judged(job, kind, victim, newest, waits, in_time=in_time, took=took, at_start=at_start)


def _judged(
  job: Job,
  kind: str,
  victim: int,
  newest: int,
  waits: list[int],
  *,
  in_time: bool,
  took: float,
  at_start: bool,
) -> Ended:
  codes = {i: job.processes[i].poll() for i in waits}
  logs = {i: job.log(i) for i in waits}
  culprit = re.compile(rf"^paxlike: .*process(es)? {victim} of {job.count}", re.MULTILINE)
  if kind == "twice":
    said = job.log(job.count)
    # It comes while the others meet, or later, or is there alone when they have ended.
    named = (
      re.search(r"^paxlike: .*(has already joined|did not (connect|answer)|is in use)", said, re.M)
      is not None
    )
    expected: tuple[int, ...] = (143,)
  elif kind == "term":
    # Before it trains, a process ends at once, and is named by the others.
    stopped = all(code == 143 for code in codes.values())
    named = stopped or all(culprit.search(logs[i]) for i in waits if i != victim)
    expected = (143, 75, -15)
  else:
    named = all(culprit.search(log) for log in logs.values())
    expected = (75,)
  named = named and not any(ABORTS.search(log) for log in logs.values())
  state = job.state()
  began = newest_status_is_new(job, newest, logs.get(0, ""))
  wanted = STATES.get(kind, "stalled")
  right = state in (wanted, "lost" if kind == "term" else wanted) if began else state != "running"
  right = right and all(code in expected for code in codes.values())
  first = job.log(0)
  resumed = None
  if newest and "parameters:" in first:
    resumed = f"resuming from checkpoint {newest}" in first
  note = ""
  if not (in_time and named and right and resumed is not False):
    tails = {i: log[-300:] for i, log in logs.items()}
    note = f"victim {victim}, at start {at_start}, codes {codes}, state {state}, {tails}"
  return Ended(in_time, named, right, resumed, took, note)


def newest_status_is_new(job: Job, newest: int, log: str) -> bool:
  """Returns whether the run has got so far that status.json is its own."""
  return job.newest() > newest or "parameters:" in log


def campaign(
  folder: pathlib.Path, *, count: int, kinds: list[str], rng: random.Random, times: Times
) -> tuple[dict[str, list[Ended]], bool]:
  """Returns what became of each fault, by kind, and whether all losses are those without faults."""
  found: dict[str, list[Ended]] = collections.defaultdict(list)
  for number, kind in enumerate(kinds):
    job = Job(folder, count=count, times=times)
    one = harm(job, kind, rng, times)
    found[kind].append(one)
    print(
      f"{count} processes, fault {number}: {kind}, {one.seconds:.1f} s, in time {one.in_time},"
      f" named {one.named}, status {one.status}, resumed {one.resumed} {one.note}",
      flush=True,
    )
  last = Job(folder, count=count, times=times).newest() + 3
  for where in ("run", "alone"):
    job = Job(folder, count=count, times=times, max_steps=last)
    job.folder = folder / where
    job._flags[-1] = f"--job_log_dir={job.folder}"
    job.start()
    ended = job.wait(list(job.processes), seconds=600 + 20 * last)
    codes = [process.poll() for process in job.processes.values()]
    job.end()
    if not ended or any(codes):
      print(f"{where}: {codes}: {job.log(0)[-1000:]}")
      return found, False
  return found, curve(folder / "run") == curve(folder / "alone")


def table(found: dict[str, list[Ended]]) -> str:
  """Returns the counts by kind, as Markdown."""
  lines = [
    "| fault | jobs | ended in time | named | status | resumed | longest |",
    "|---|---:|---:|---:|---:|---:|---:|",
  ]
  for kind in sorted(found, key=KINDS.index):
    ended = found[kind]
    counts = [sum(getattr(one, name) for one in ended) for name in ("in_time", "named", "status")]
    known = [one.resumed for one in ended if one.resumed is not None]
    row = (kind, len(ended), *counts, f"{sum(known)} of {len(known)}")
    seconds = max(one.seconds for one in ended)
    lines.append(f"| {' | '.join(map(str, row))} | {seconds:.1f} s |")
  return "\n".join(lines)


def main() -> int:
  """Runs the campaign in a temporary folder."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--faults", type=int, default=200)
  parser.add_argument("--processes", default="2,4")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--kinds", default=",".join(KINDS))
  parser.add_argument("--heartbeat", type=int, default=10, help="--heartbeat_timeout")
  parser.add_argument("--join", type=int, default=30, help="--join_timeout")
  parser.add_argument("--slack", type=int, default=60, help="seconds more in which jobs must end")
  options = parser.parse_args()
  times = Times(options.heartbeat, options.join, options.slack)
  # As tests/conftest.py: programs are compiled more than they compute.
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
  counts = [int(text) for text in options.processes.split(",")]
  names = options.kinds.split(",")
  wrong = False
  for place, count in enumerate(counts):
    rng = random.Random(f"{options.seed} {count}")
    share = options.faults // len(counts) + (place < options.faults % len(counts))
    kinds = [names[i % len(names)] for i in range(share)]
    rng.shuffle(kinds)
    with tempfile.TemporaryDirectory() as name:
      found, same = campaign(pathlib.Path(name), count=count, kinds=kinds, rng=rng, times=times)
    print(f"\n{count} processes, seed {options.seed}:\n\n{table(found)}\n")
    print(f"losses of all steps are{'' if same else ' NOT'} those of a job without faults, bitwise")
    every = [one for some in found.values() for one in some]
    wrong |= not same or any(one.note for one in every)
  return wrong


if __name__ == "__main__":
  sys.exit(main())
