# SPDX-License-Identifier: Apache-2.0
"""Ends a job if a process is stalled, lost or has failed, with a line that names the process.

A thread of each process checks the phase of its main thread (`stall_detector`) at least once a
second. The processes send heartbeats with their phase to process 0, which finds a lost process or,
in a stall, the process that the others wait for (`failure_detector`). Every process detects a lost
process 0 by itself. The same messages carry what all processes decide together (`consensus`).
"""

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath

from paxlike.errors import UserError
from paxlike.processes import (
  failure_detector,
  phases,
  rendezvous,
  stack_traces,
  stall_detector,
  verdicts,
)
from paxlike.processes.consensus import Comparison, StopAgreement

_LINGER = 3.0  # Seconds for the other processes to read the verdict.
_SAY_SECONDS = 2.0  # Time-out for printing a line.


class Limits(NamedTuple):
  """Options of a run's watch.

  Attributes:
    folder: The run's folder, for stacks and `status.json`.
    stall_timeout: STALL_TIMEOUT; see `phases.Progress.limit`.
    stack_interval: Seconds between periodic writes of stacks; None: no such writes.
  """

  folder: epath.Path | None = None
  stall_timeout: float | None = 0.0
  stack_interval: float | None = None


class Watch(threading.Thread):
  """The watch of this process."""

  def __init__(
    self,
    connections: rendezvous.Connections | None = None,
    *,
    index: int = 0,
    count: int = 1,
    timeout: float = 60,
  ):
    """Watches process `index` of `count`; `timeout` is the heartbeat time-out in seconds."""
    super().__init__(daemon=True, name="watch")
    self.timeout = timeout
    self._connections, self._index, self._count = connections, index, count
    self._links = {} if connections is None else connections.links
    hosts = {index: socket.gethostname()} if connections is None else connections.hosts
    self._members = failure_detector.Members(hosts, index=index, count=count, timeout=timeout)
    self._poll = min(1.0, timeout / 4)
    self._every = min(5.0, timeout / 4)
    self._limits = Limits()
    self._wake, self._waker = socket.socketpair()
    self._waker.setblocking(False)
    self._stall = stall_detector.Stall(self._members.named(index))
    self._stopping, self._comparison = StopAgreement(is_alone=count == 1), Comparison()
    self._since_stacks = 0.0
    self._state, self._reason = "", ""  # See `failure_detector.Member.state`.
    self._since_failed = 0.0
    self._is_to_blame = threading.Event()  # Set if no other process caused this one's failure.
    self._closed = threading.Event()

  @property
  def is_alone(self) -> bool:
    """Whether this is the only process."""
    return self._count == 1

  @property
  def wakeup(self) -> int:
    """The file descriptor for `signal.set_wakeup_fd`."""
    return self._waker.fileno()

  @contextlib.contextmanager
  def watching(self, limits: Limits) -> Iterator[None]:
    """Context of work that must make progress; `limits` override those of an outer context."""
    before, self._limits, self._stall.age = self._limits, limits, 0.0
    try:
      yield
    finally:
      self._limits = before._replace(folder=self._limits.folder or before.folder)

  def close(self):
    """Ends the watch of a single process."""
    self._closed.set()
    self._stir()
    self.join()
    self._stall.close()
    self._wake.close()
    self._waker.close()

  def leave(self):
    """Reports to the other processes that this one's work is done."""
    self._state = "left"
    self._stir()

  def fail(self, error: BaseException):
    """Reports this process's failure to the others; only the first call counts."""
    if not self._state:
      self._reason = verdicts.reason(error)
      self._state = "failing" if verdicts.is_of_jax(error) else "failed"
      self._stir()

  def wait_for_others(self):
    """Returns when a failing process may end and print why.

    If another process is lost or has failed, the watch ends this one and names that process.
    """
    if self._state == "failing":
      self._is_to_blame.wait(1.25 * self.timeout)
      self._state = "failed"
      self._stir()
    # Time for the others to read the report before JAX fails there.
    seconds = failure_detector.FAILED_AFTER * (2 if self._index == 0 else 0.25)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not self._is_abandoned():
      time.sleep(0.05)

  def _is_abandoned(self) -> bool:
    return all(link.closed for link in self._links.values())

  def compare(self, given: Mapping[str, str]):
    """A barrier that compares values between processes.

    Raises:
      UserError: A process has other values than process 0; raised in all processes.
    """
    times = self._comparison.give(given)
    self._stir()
    if differs := self._comparison.wait(times):
      raise UserError(f"{differs}. Start all processes with the same configuration and code.")

  def ask_to_stop(self):
    """Asks all processes to stop at the same sync point."""
    self._stopping.asked.set()
    self._stir()

  def stops_here(self, place: int) -> bool:
    """Returns whether all processes stop at sync point `place`; each calls this at each point."""
    return self._stopping.is_here(place)

  def _stir(self):
    with contextlib.suppress(OSError):
      self._waker.send(b"\0")

  # The methods below run in the watch's thread.

  def run(self):
    """Runs until the process ends or the watch is closed."""
    last = time.monotonic()
    since_report = self._every
    sent: Any = None  # The urgent values of the last report; a change is sent at once.
    while not self._closed.is_set():
      self._hear()
      now = time.monotonic()
      # Time while the process was suspended does not count as a stall.
      tick, last = min(now - last, 2 * self._poll), now
      self._observe(tick)
      since_report += tick
      if (values := self._comparison.unsent()) is not None:
        self._give(values)
      report = self._report()
      urgent = (
        report["over"],
        report["state"],
        report["stop"],
        report["next"],
        self._stopping.agreed,
      )
      if self._links and (urgent != sent or since_report >= self._every):
        sent, since_report = urgent, 0.0
        self._send(report)
      if verdict := self._judge(report, tick):
        self._end(verdict)
      self._end_if_abandoned(tick)

  def _hear(self):
    """Handles messages and signals; waits for at most one poll interval."""
    links = {link: index for index, link in self._links.items() if not link.closed}
    can_read = rendezvous.ready([self._wake, *links], self._poll)
    if self._wake in can_read:
      self._obey(self._wake.recv(4096))
    for link, index in links.items():
      for message in link.receive() if link in can_read else ():
        self._take(index, message)

  def _obey(self, signals: bytes):
    """Handles signals, even while the main thread is blocked."""
    if {signal.SIGTERM, signal.SIGINT} & set(signals):
      self._stopping.asked.set()
    if signal.SIGUSR1 in signals and (path := self._write_stacks("asked for by SIGUSR1")):
      _say(f"wrote the stacks of all threads: {path}")

  def _take(self, index: int, message: dict[str, Any]):
    """Handles a message of process `index`."""
    self._members.take(index, message)
    if verdict := message.get("verdict"):
      self._end(verdicts.Verdict(**verdict), forward=False)
    if message.get("all_fail"):
      self._is_to_blame.set()
    if message.get("stop"):
      self._stopping.asked.set()
    if message.get("agreed") is not None:
      self._stopping.agree(message["agreed"])
    if "compared" in message:
      self._comparison.settle(message["round"], message["compared"])

  def _observe(self, tick: float):
    """Checks for a stall, proposes a sync point if a stop is requested, writes periodic stacks."""
    self._stall.observe(
      tick,
      self._limits.stall_timeout,
      must_stop=self._stopping.asked.is_set() and not self._stopping.is_reached,
      is_ending=bool(self._state),
    )
    self._stopping.promise()
    if (interval := self._limits.stack_interval) is not None:
      self._since_stacks += tick
      if self._since_stacks >= interval:
        self._since_stacks = 0.0
        self._write_stacks("written periodically (STACK_TRACE_INTERVAL)", periodic=True)

  def _report(self) -> dict[str, Any]:
    report = self._stall.report()
    if self._state == "left":
      report["number"] = failure_detector.LEFT
    return report | {
      "state": self._state,
      "reason": self._reason,
      "stop": self._stopping.asked.is_set(),
      "next": self._stopping.promised,
    }

  def _send(self, report: dict[str, Any]):
    if self._index:
      self._links[0].send(report)
      return
    names = ("stop", "state", "reason")
    self._send_all({name: report[name] for name in names} | {"agreed": self._stopping.agreed})

  def _give(self, message: dict[str, Any]):
    """Sends the values that the main thread compares."""
    if self._index:
      self._links[0].send(message)
    else:
      self._members.take(0, message)

  def _judge(self, report: dict[str, Any], tick: float) -> verdicts.Verdict | None:
    """Returns the verdict, if any; process 0 also decides on stops and comparisons."""
    closed = {index for index, link in self._links.items() if link.closed}
    found = self._members.judge(report, tick, closed=closed)
    if found is not None or self._index:
      return found
    place = self._members.last_promised()
    if self._stopping.asked.is_set() and self._stopping.agreed is None and place is not None:
      self._stopping.agree(place)
    times = self._comparison.pending()
    if times is not None and (differs := self._members.compared(times)) is not None:
      self._send_all({"round": times, "compared": differs})
      self._comparison.settle(times, differs)
    if not self._is_to_blame.is_set() and self._members.all_fail():
      self._send_all({"all_fail": True})
      self._is_to_blame.set()
    return None

  def _send_all(self, message: Mapping[str, Any]):
    for link in self._links.values():
      link.send(message)

  def _end_if_abandoned(self, tick: float):
    """Ends a failed process that hangs, for example waiting for processes that have ended."""
    self._since_failed += tick if self._state == "failed" else 0.0
    if self._links and self._since_failed > stall_detector.GRACE and self._is_abandoned():
      _say(f"{self._members.named(self._index)} has failed: {self._reason}.")
      stack_traces.exit_at_once(1)

  def _end(self, verdict: verdicts.Verdict, *, forward: bool = True) -> None:
    """Sends the verdict to the other processes, reports it, and ends this process."""
    if forward:
      self._send_all({"verdict": verdict._asdict()})
    if verdict.kind == "failed" and verdict.index == self._index:
      self._is_to_blame.set()
    if self._is_to_blame.is_set() or self._state == "failed":
      return None  # It ends on its own, and prints why.
    path, calls = None, ""
    if verdict.kind == "stalled":
      path, calls = self._write_stacks(verdict.why), stack_traces.of_main_thread()
    leader = (
      (socket.gethostname(), os.getpid()) if self._connections is None else self._connections.leader
    )
    if (folder := self._limits.folder) is not None:
      first = self._index == (1 if verdict.index == 0 and not self.is_alone else 0)
      wait = 0.0 if first else 1.0
      verdicts.in_time(lambda: verdicts.write_status(folder, verdict, leader, wait=wait))
    for action in verdicts.last_actions:
      verdicts.in_time(functools.partial(action, verdict))
    of = None if verdict.index == self._index else self._members.named(self._index)
    _say(verdict.line(of=of, trains=folder in verdicts.trained, stacks=path, calls=calls))
    self._stall.disarm()
    if self._index == 0:
      deadline = time.monotonic() + _LINGER
      while self._links and time.monotonic() < deadline:
        open_links = [link for link in self._links.values() if not link.closed]
        if not open_links:
          break
        for link in rendezvous.ready(open_links, 0.2):
          link.receive()
    stack_traces.exit_at_once(verdict.status)
    raise AssertionError("the process has ended")

  def _write_stacks(self, why: str, *, periodic: bool = False) -> epath.Path | None:
    """Writes the stacks into the run's folder; returns the file, None without one or on failure."""
    folder = self._limits.folder
    if folder is None:
      return None
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    heading = [
      f"{self._members.named(self._index)}, pid {os.getpid()}, {now}",
      f"why: {why}",
      f"now: {phases.OWN.now}, without progress for {self._stall.age:.1f} s",
      "the last phases of this process:",
      *phases.OWN.recent(),
    ]
    write = stack_traces.write_periodic if periodic else stack_traces.write
    return verdicts.in_time(lambda: write(folder, self._index, stack_traces.text(heading)))


def _say(text: str):
  """Prints a line, with a time-out in case stderr blocks."""
  say = functools.partial(print, f"paxlike: {text}", file=sys.stderr, flush=True)
  verdicts.in_time(say, seconds=_SAY_SECONDS)


_current: Watch | None = None


def current() -> Watch | None:
  """Returns the watch of this process, if there is one."""
  return _current


def start(connections: rendezvous.Connections, *, index: int, count: int, timeout: float) -> Watch:
  """Starts the watch of one of several processes; it runs until the process ends."""
  global _current
  _current = Watch(connections, index=index, count=count, timeout=timeout)
  _current.start()
  return _current


@contextlib.contextmanager
def watching(limits: Limits) -> Iterator[Watch]:
  """Context of work that must make progress; yields the watch, created if there is none."""
  global _current
  made = None
  if _current is None:
    made = _current = Watch()
    made.start()
  is_main = threading.current_thread() is threading.main_thread()
  try:
    with _current.watching(limits), stack_traces.on_signal():
      before = is_main and signal.set_wakeup_fd(_current.wakeup, warn_on_full_buffer=False)
      try:
        yield _current
      finally:
        if is_main:
          signal.set_wakeup_fd(before)
  finally:
    if made is not None:
      made.close()
      _current = None


@contextlib.contextmanager
def reporting() -> Iterator[None]:
  """Context whose exceptions are reported to the other processes at once."""
  try:
    yield
  except BaseException as error:
    if _current is not None and not _current.is_alone:
      _current.fail(error)
    raise
