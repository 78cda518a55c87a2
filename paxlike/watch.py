# SPDX-License-Identifier: Apache-2.0
"""Ends a job of which a process is stuck, lost or has failed, with a line that names it.

A thread of each process looks every second or more often at the phase that its main thread is in
(`progress`). The processes of a job report theirs to process 0, which finds which of them is gone
or, where nothing goes on, for which the others wait (`members`). If process 0 is gone, every other
process detects that by itself.
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

from paxlike import ending, members, progress, rendezvous, stacks, watchdog
from paxlike.errors import UserError

_GRACE = 20.0  # Seconds, or three steps, that a process asked to stop has to the end of its step.
_GRACE_TO_COMPILE = 300.0  # Seconds, where it is compiling or no step has been timed yet.
_BEYOND = 10.0  # Seconds after which the watchdog acts where the watch does not.
_LINGER = 3.0  # Seconds in which the others read the verdict.
_SAY_SECONDS = 2.0  # For a line: its reader may take nothing.
_PRINTS = "waiting for a reader of its output"


class Limits(NamedTuple):
  """What a run asks of its watch.

  Attributes:
    folder: The run's, for stacks and `status.json`.
    stall_timeout: See `progress.Progress.limit`.
    stack_interval: Seconds between two writings of stacks; None: none.
  """

  folder: epath.Path | None = None
  stall_timeout: float | None = 0.0
  stack_interval: float | None = None


class Watch(threading.Thread):
  """The watch of this process."""

  def __init__(
    self, met: rendezvous.Met | None = None, *, index: int = 0, count: int = 1, timeout: float = 60
  ):
    """Of process `index`. A process that sends nothing for `timeout` seconds counts as gone."""
    super().__init__(daemon=True, name="watch")
    self.timeout = timeout
    self._met, self._index, self._count = met, index, count
    self._links = {} if met is None else met.links
    hosts = {index: socket.gethostname()} if met is None else met.hosts
    self._members = members.Members(hosts, index=index, count=count, timeout=timeout)
    self._poll = min(1.0, timeout / 4)
    self._every = min(5.0, timeout / 4)
    self._limits = Limits()
    self._wake, self._waker = socket.socketpair()
    self._waker.setblocking(False)
    self._watchdog = watchdog.Watchdog()
    self._age, self._number, self._bytes, self._is_over = 0.0, -1, 0, False
    self._since_stacks = 0.0
    self._state, self._reason = "", ""  # See `members.Member.state`.
    self._since_failed = 0.0
    self._is_to_blame = threading.Event()  # Set once JAX has failed in this by no other process.
    self._given: tuple[int, Mapping[str, str]] = (0, {})
    self._sent, self._compared = 0, (0, "")
    self._asked = threading.Event()  # Somebody asks the job to stop.
    self._decided = threading.Condition()
    self._boundary: int | None = None  # The last place at which this process could stop.
    self._next: int | None = None  # The place at which it promises to ask what is agreed.
    self._agreed: int | None = None
    self._is_stopping = False  # Whether it has reached the place at which all stop.
    self._closed = threading.Event()

  @property
  def is_alone(self) -> bool:
    """Whether there is no other process."""
    return self._count == 1

  @property
  def wakeup(self) -> int:
    """The file that `signal.set_wakeup_fd` wants."""
    return self._waker.fileno()

  @contextlib.contextmanager
  def over(self, limits: Limits) -> Iterator[None]:
    """Context of work that must make progress. Within another such context its limits hold."""
    before, self._limits, self._age = self._limits, limits, 0.0
    try:
      yield
    finally:
      self._limits = before._replace(folder=self._limits.folder or before.folder)

  def close(self):
    """Ends the watch of a process that is alone."""
    self._closed.set()
    self._stir()
    self.join()
    self._watchdog.close()
    self._wake.close()
    self._waker.close()

  def leave(self):
    """Reports to the other processes that the work of this one is done."""
    self._state = "left"
    self._stir()

  def fail(self, error: BaseException):
    """Reports to the other processes that this one fails; the first error counts."""
    if not self._state:
      self._reason = ending.reason(error)
      self._state = "failing" if ending.is_of_jax(error) else "failed"
      self._stir()

  def wait_for_others(self):
    """Returns when a process that fails may end and print why.

    Where another one is lost or has failed, the watch ends this process by the name of that.
    """
    if self._state == "failing":
      self._is_to_blame.wait(1.25 * self.timeout)
      self._state = "failed"
      self._stir()
    # The others read it before their JAX notices anything.
    seconds = members.FAILED_AFTER * (2 if self._index == 0 else 0.25)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not self._is_abandoned():
      time.sleep(0.05)

  def _is_abandoned(self) -> bool:
    return all(link.closed for link in self._links.values())

  def compare(self, given: Mapping[str, str]):
    """Returns when all processes have called this, with the same.

    Raises:
      UserError: A process has given something else than process 0; in all of them.
    """
    times = self._given[0] + 1
    self._given = (times, given)
    self._stir()
    with self._decided:
      while self._compared[0] < times:
        self._decided.wait()  # The watch ends the process if another does not come.
    if differs := self._compared[1]:
      raise UserError(f"{differs}. Start all with the same configuration and code.")

  def ask_to_stop(self):
    """Asks the job to stop: all processes at the same place."""
    self._asked.set()
    self._stir()

  def stops_here(self, place: int) -> bool:
    """Returns whether all processes stop at this place: each calls this at each, by its number.

    On hearing of a stop, a process promises to call this at the next place. All stop at the latest
    promised place.
    """
    with self._decided:
      self._boundary = place
      if self.is_alone and self._asked.is_set():
        self._agreed = place
      while self._next is not None and place >= self._next and self._agreed is None:
        self._decided.wait()  # The watch ends the process if nobody decides.
      self._is_stopping = self._agreed is not None and place >= self._agreed
    return self._is_stopping

  def _stir(self):
    with contextlib.suppress(OSError):
      self._waker.send(b"\0")

  # What the thread does.

  def run(self):
    """Goes on until the process ends, or the watch is closed."""
    last = time.monotonic()
    since_report = self._every
    sent: Any = None  # What of the last report the others had to know at once.
    while not self._closed.is_set():
      self._hear()
      now = time.monotonic()
      # A process that was suspended, with its job or alone, was not stuck.
      tick, last = min(now - last, 2 * self._poll), now
      self._observe(tick)
      since_report += tick
      if self._given[0] > self._sent:
        self._give()
      report = self._report()
      urgent = (report["over"], report["state"], report["stop"], report["next"], self._agreed)
      if self._links and (urgent != sent or since_report >= self._every):
        sent, since_report = urgent, 0.0
        self._send(report)
      if verdict := self._judge(report, tick):
        self._end(verdict)
      self._end_if_abandoned(tick)

  def _hear(self):
    """Waits for messages and signals, a poll at most."""
    links = {link: index for index, link in self._links.items() if not link.closed}
    can_read = rendezvous.ready([self._wake, *links], self._poll)
    if self._wake in can_read:
      self._obey(self._wake.recv(4096))
    for link, index in links.items():
      for message in link.receive() if link in can_read else ():
        self._take(index, message)

  def _obey(self, signals: bytes):
    """Does what signals ask for, also where the main thread does not get to it."""
    if {signal.SIGTERM, signal.SIGINT} & set(signals):
      self._asked.set()
    if signal.SIGUSR1 in signals and (path := self._write_stacks("asked for by SIGUSR1")):
      _say(f"wrote the stacks of all threads: {path}")

  def _take(self, index: int, message: dict[str, Any]):
    """Takes a message of process `index`."""
    self._members.take(index, message)
    if verdict := message.get("verdict"):
      self._end(ending.Verdict(**verdict), forward=False)
    if message.get("all_fail"):
      self._is_to_blame.set()
    if message.get("stop"):
      self._asked.set()
    if message.get("agreed") is not None:
      self._agree(message["agreed"])
    if "compared" in message:
      self._settle(message["round"], message["compared"])

  def _observe(self, tick: float):
    """Finds for how long the phase of this process has gone on without progress."""
    now, given = progress.OWN.now, self._limits.stall_timeout
    moved = False
    if now.kind in progress.MOVES_BYTES:
      moved = (count := progress.bytes_moved()) - self._bytes > 2**20
      if moved or now.number != self._number:
        self._bytes = count
    self._age = 0.0 if moved or now.number != self._number else self._age + tick
    self._number = now.number
    limit = self._limit(now.kind, given)
    self._is_over = (
      not self._state and limit is not None and self._age > limit and not stacks.is_debugged()
    )
    if limit is None or self._state:
      self._watchdog.disarm()
    else:
      line = f"{self._members.named(self._index)} is stuck: no Python code runs (last seen {now}),"
      line += " as where a C function keeps the interpreter's lock. Its stacks follow; it ends by"
      self._watchdog.arm(max(limit - self._age, 0.0) + _BEYOND, f"{line} SIGALRM.")
    if self._asked.is_set() and self._next is None:
      with self._decided:
        self._next = -1 if self._boundary is None else self._boundary + 1
    if (interval := self._limits.stack_interval) is not None:
      self._since_stacks += tick
      if self._since_stacks >= interval:
        self._since_stacks = 0.0
        self._write_stacks("written periodically (STACK_TRACE_INTERVAL)", periodic=True)

  def _limit(self, kind: str, given: float | None) -> float | None:
    limit = progress.OWN.limit(kind, given)
    if not self._asked.is_set() or self._is_stopping or kind in progress.MOVES_BYTES:
      return limit
    step = None if kind in progress.COMPILES else progress.OWN.step_seconds()
    grace = _GRACE_TO_COMPILE if step is None else max(_GRACE, 3 * step)
    return grace if limit is None else min(limit, grace)

  def _report(self) -> dict[str, Any]:
    now = progress.OWN.now
    return {
      "number": members.LEFT if self._state == "left" else now.number,
      "what": _PRINTS if self._is_over and stacks.is_printing() else str(now),
      "age": self._age,
      "over": self._is_over,
      "waits": self._is_over and stacks.waits_for_others(),
      "state": self._state,
      "reason": self._reason,
      "stop": self._asked.is_set(),
      "next": self._next,
    }

  def _send(self, report: dict[str, Any]):
    if self._index:
      self._links[0].send(report)
      return
    names = ("stop", "state", "reason")
    self._send_all({name: report[name] for name in names} | {"agreed": self._agreed})

  def _agree(self, place: int):
    with self._decided:
      self._agreed = place
      self._decided.notify_all()

  def _give(self):
    """Passes on what the main thread wants to be compared."""
    times, given = self._given
    self._sent = times
    message = {"round": times, "given": dict(given)}
    if self._index:
      self._links[0].send(message)
    else:
      self._members.take(0, message)

  def _settle(self, times: int, differs: str):
    with self._decided:
      self._compared = (times, differs)
      self._decided.notify_all()

  def _judge(self, report: dict[str, Any], tick: float) -> ending.Verdict | None:
    """Returns why the job ends, if it does; process 0 also decides what others wait for."""
    closed = {index for index, link in self._links.items() if link.closed}
    found = self._members.judge(report, tick, closed=closed)
    if found is not None or self._index:
      return found
    place = self._members.last_promised()
    if self._asked.is_set() and self._agreed is None and place is not None:
      self._agree(place)
    times = self._compared[0] + 1
    if self._sent == times and (differs := self._members.compared(times)) is not None:
      self._send_all({"round": times, "compared": differs})
      self._settle(times, differs)
    if not self._is_to_blame.is_set() and self._members.all_fail():
      self._send_all({"all_fail": True})
      self._is_to_blame.set()
    return None

  def _send_all(self, message: Mapping[str, Any]):
    for link in self._links.values():
      link.send(message)

  def _end_if_abandoned(self, tick: float):
    """Ends a failed process that does not end, as where it waits for processes that have ended."""
    self._since_failed += tick if self._state == "failed" else 0.0
    if self._links and self._since_failed > _GRACE and self._is_abandoned():
      _say(f"{self._members.named(self._index)} has failed: {self._reason}.")
      stacks.exit_at_once(1)

  def _end(self, verdict: ending.Verdict, *, forward: bool = True) -> None:
    """Ends the process, after it has written why and sent that to the others."""
    if forward:
      self._send_all({"verdict": verdict._asdict()})
    if verdict.kind == "failed" and verdict.index == self._index:
      self._is_to_blame.set()
    if self._is_to_blame.is_set() or self._state == "failed":
      return None  # It ends by itself, and prints why.
    path, calls = None, ""
    if verdict.kind == "stalled":
      path, calls = self._write_stacks(verdict.why), stacks.of_main_thread()
    leader = None if self._met is None else self._met.leader
    if (folder := self._limits.folder) is not None:
      first = self._index == (1 if verdict.index == 0 and not self.is_alone else 0)
      wait = 0.0 if first else 1.0
      ending.in_time(lambda: ending.write_status(folder, verdict, leader, wait=wait))
    of = None if verdict.index == self._index else self._members.named(self._index)
    _say(verdict.line(of=of, stacks=path, calls=calls))
    self._watchdog.disarm()
    if self._index == 0:
      deadline = time.monotonic() + _LINGER
      while self._links and time.monotonic() < deadline:
        open_links = [link for link in self._links.values() if not link.closed]
        if not open_links:
          break
        for link in rendezvous.ready(open_links, 0.2):
          link.receive()
    stacks.exit_at_once(verdict.status)
    raise AssertionError("the process has ended")

  def _write_stacks(self, why: str, *, periodic: bool = False) -> epath.Path | None:
    """Writes the stacks into the folder of the run, if there is one and it takes them."""
    folder = self._limits.folder
    if folder is None:
      return None
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    heading = [
      f"{self._members.named(self._index)}, pid {os.getpid()}, {now}",
      f"why: {why}",
      f"now: {progress.OWN.now}, without progress for {self._age:.1f} s",
      "the last phases of this process:",
      *progress.OWN.recent(),
    ]
    write = stacks.write_periodic if periodic else stacks.write
    return ending.in_time(lambda: write(folder, self._index, stacks.text(heading)))


def _say(text: str):
  """Prints a line, unless nobody reads it."""
  say = functools.partial(print, f"paxlike: {text}", file=sys.stderr, flush=True)
  ending.in_time(say, seconds=_SAY_SECONDS)


_current: Watch | None = None


def current() -> Watch | None:
  """Returns the watch of this process, if there is one."""
  return _current


def start(met: rendezvous.Met, *, index: int, count: int, timeout: float) -> Watch:
  """Starts the watch of one of several processes; it goes on until the process ends."""
  global _current
  _current = Watch(met, index=index, count=count, timeout=timeout)
  _current.start()
  return _current


@contextlib.contextmanager
def over(limits: Limits) -> Iterator[Watch]:
  """Context of work that must make progress; gives the watch, made here if there is none yet."""
  global _current
  made = None
  if _current is None:
    made = _current = Watch()
    made.start()
  is_main = threading.current_thread() is threading.main_thread()
  try:
    with _current.over(limits), stacks.on_signal():
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
  """Context whose exceptions the other processes hear of before anything is waited for."""
  try:
    yield
  except BaseException as error:
    if _current is not None and not _current.is_alone:
      _current.fail(error)
    raise
