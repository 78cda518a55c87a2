# SPDX-License-Identifier: Apache-2.0
"""Ends a job of which a process is stuck, lost or has failed, with a line that names it.

A thread of each process looks every second or more often at the phase that its main thread is in
(`progress`). The processes of a job report theirs to process 0, which finds who is gone and, where
nothing goes on, for whom the others wait. Where process 0 is gone, each finds that itself.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from paxlike import ending, progress, rendezvous, stacks

_GRACE = 20.0  # Seconds, or three steps, that a process asked to stop has to the end of its step.
_GRACE_TO_COMPILE = 300.0  # Seconds, where it is compiling meanwhile.
_BEYOND = 10.0  # Seconds after which the switch acts where the watch does not.
_FAILED_AFTER = 2.0  # Seconds after which a failed process ends the others, which may fail too.
_LINGER = 3.0  # Seconds in which the others read the verdict.
_LEFT = 2**62  # The count of phases of a process that waits for nothing any more.


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


class _Member:
  """What process 0 knows of another, or of itself."""

  def __init__(self):
    self.report: dict[str, Any] = {"number": 0, "state": "", "what": "starting", "over": False}
    self.silent = 0.0
    self.failed = 0.0


class Watch(threading.Thread):
  """The watch of this process."""

  def __init__(
    self, met: rendezvous.Met | None = None, *, index: int = 0, count: int = 1, timeout: float = 60
  ):
    """For process `index` of `count`; without a sign for `timeout` seconds one is gone."""
    super().__init__(daemon=True, name="watch")
    self.timeout = timeout
    self._met, self._index, self._count = met, index, count
    self._host = socket.gethostname()
    self._links = {} if met is None else met.links
    self._members = {i: _Member() for i in range(count if index == 0 else 1)}
    self._poll = min(1.0, timeout / 4)
    self._every = min(5.0, timeout / 4)
    self._limits = Limits()
    self._wake, self._waker = socket.socketpair()
    self._waker.setblocking(False)
    self._switch = stacks.Switch()
    self._age, self._number, self._bytes, self._is_over = 0.0, -1, 0, False
    self._since_stacks = 0.0
    self._state, self._reason = "", ""  # "", left or failed.
    self._asked = threading.Event()  # Somebody asks the job to stop.
    self._decided = threading.Condition()
    self._boundary: int | None = None  # The last step at whose end this process could stop.
    self._next: int | None = None  # The step at whose end it promises to ask what is agreed.
    self._agreed: int | None = None
    self._is_stopping = False  # Whether it has reached the step after which all stop.
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
    """Context of the work that is watched: from now on it must go on."""
    self._limits, self._age = limits, 0.0
    try:
      yield
    finally:
      self._limits = Limits(folder=limits.folder)

  def close(self):
    """Ends the watch of a process that is alone."""
    self._closed.set()
    self._stir()
    self.join()
    self._switch.close()
    self._wake.close()
    self._waker.close()

  def leave(self, *, failed: bool, reason: str = ""):
    """Says to the others that the work of this process has ended."""
    self._state, self._reason = "failed" if failed else "left", reason
    self._stir()
    if failed and self._links:
      # The others read it before JAX notices anything.
      self._wait_for_end(2 * _FAILED_AFTER if self._index == 0 else _FAILED_AFTER / 4)

  def _wait_for_end(self, seconds: float):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not all(x.closed for x in self._links.values()):
      time.sleep(0.05)

  def ask_to_stop(self):
    """Asks the job to stop: all processes after the same step."""
    self._asked.set()
    self._stir()

  def stops_after(self, step: int) -> bool:
    """Returns whether all processes stop after this step; each asks at the end of each one.

    A process promises to ask here at the end of the step after that in which it hears that somebody
    wants to stop. All stop after the last of the steps that were promised.
    """
    with self._decided:
      self._boundary = step
      if self.is_alone and self._asked.is_set():
        self._agreed = step
      while self._next is not None and step >= self._next and self._agreed is None:
        self._decided.wait()  # The watch ends the process if nobody decides.
      self._is_stopping = self._agreed is not None and step >= self._agreed
    return self._is_stopping

  def _stir(self):
    with contextlib.suppress(OSError):
      self._waker.send(b"\0")

  # What the thread does.

  def run(self):
    """Goes on until the process ends, or the watch is closed."""
    last = time.monotonic()
    since_report = self._every
    shown: Any = None
    while not self._closed.is_set():
      self._hear()
      now = time.monotonic()
      # A process that was suspended, with its job or alone, was not stuck.
      tick, last = min(now - last, 2 * self._poll), now
      self._observe(tick)
      since_report += tick
      report = self._report()
      signs = (report["over"], report["state"], report["stop"], report["next"], self._agreed)
      if self._links and (signs != shown or since_report >= self._every):
        shown, since_report = signs, 0.0
        self._send(report)
      if verdict := self._judge(report, tick):
        self._end(verdict)

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
    member = self._members[index]
    member.silent = 0.0
    if verdict := message.get("verdict"):
      self._end(ending.Verdict(**verdict), told=True)
    if message.get("stop"):
      self._asked.set()
    if "agreed" in message and message["agreed"] is not None:
      self._agree(message["agreed"])
    if "number" in message:
      member.report = message
    elif "state" in message:
      member.report |= message

  def _observe(self, tick: float):
    """Finds for how long the phase of this process has gone on without progress."""
    now, given = progress.OWN.now, self._limits.stall_timeout
    moved = False
    if now.kind in progress.MOVES_BYTES:
      moved = (count := _bytes_moved()) - self._bytes > 2**20
      if moved or now.number != self._number:
        self._bytes = count
    self._age = 0.0 if moved or now.number != self._number else self._age + tick
    self._number = now.number
    limit = self._limit(now.kind, given)
    self._is_over = (
      not self._state and limit is not None and self._age > limit and not stacks.is_debugged()
    )
    if limit is None or self._state:
      self._switch.disarm()
    else:
      left = max(limit - self._age, 0.0) + _BEYOND
      line = (
        f"{self._named(self._index)} is stuck: no Python code runs (last seen {now}), as where a"
      )
      line += " C function keeps the interpreter's lock. Its stacks follow; it ends by SIGALRM."
      self._switch.arm(left, line)
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
    is_compiling = kind in ("compile", "eval_compile")
    grace = _GRACE_TO_COMPILE if is_compiling else max(_GRACE, 3 * progress.OWN.typical("step"))
    return grace if limit is None else min(limit, grace)

  def _report(self) -> dict[str, Any]:
    now = progress.OWN.now
    return {
      "number": _LEFT if self._state == "left" else now.number,
      "what": str(now),
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
    message = {name: report[name] for name in names} | {"agreed": self._agreed}
    for link in self._links.values():
      link.send(message)

  def _agree(self, step: int):
    with self._decided:
      self._agreed = step
      self._decided.notify_all()

  # What process 0 finds, and the others of process 0.

  def _judge(self, report: dict[str, Any], tick: float) -> ending.Verdict | None:
    """Returns why the job ends, if it does."""
    if self._index == 0:
      self._members[0].report = report
    for index, link in self._links.items():
      if found := self._look(index, link, tick):
        return found
    if self._index:
      return None
    working = {i: m.report for i, m in self._members.items() if m.report["state"] == ""}
    if self._asked.is_set() and self._agreed is None and working:
      promised = [one.get("next") for one in working.values()]
      if all(step is not None for step in promised):
        self._agree(max(step for step in promised if step is not None))
    return self._find_stuck(working)

  def _look(self, index: int, link: rendezvous.Link, tick: float) -> ending.Verdict | None:
    """Returns why the job ends, if that is because of process `index`."""
    member = self._members[index]
    state, name = member.report["state"], self._named(index)
    member.silent += tick
    if state == "left" and link.closed:
      return None
    if state == "failed":
      member.failed += tick
      if member.failed > _FAILED_AFTER:
        reason = member.report.get("reason")
        why = f"{name} has failed{f': {reason}' if reason else ''}"
        return ending.Verdict("failed", index, why)
    elif link.closed:
      return ending.Verdict("lost", index, f"{name} has ended without a word: it was killed")
    elif member.silent > self.timeout:
      why = f"{name} has given no sign for {member.silent:.0f} s (--heartbeat_timeout)"
      return ending.Verdict("lost", index, why)
    return None

  def _find_stuck(self, working: dict[int, dict[str, Any]]) -> ending.Verdict | None:
    """Returns for which process the others wait, if it makes no progress itself."""
    if not working:
      return None
    least = min(one["number"] for one in working.values())
    behind = {i: one for i, one in working.items() if one["number"] == least}
    stuck = {i: one for i, one in behind.items() if one["over"]}
    if not stuck:
      return None
    # Of those in the same phase, one that waits for the others is not the first.
    index = max(stuck, key=lambda i: (not stuck[i].get("waits"), stuck[i]["age"]))
    one = stuck[index]
    of_all = len(behind) == self._count > 1
    asked = " and was asked to stop" if self._asked.is_set() else ""
    why = f"{self._named(index)} is stuck{asked}: {one['what']}, for {one['age']:.0f} s"
    why += ", as are all others" if of_all else ""
    return ending.Verdict("stalled", index, why)

  def _named(self, index: int) -> str:
    if self.is_alone:
      return f"this process (on {self._host})"
    host = self._met.hosts.get(index, "?") if self._met else self._host
    return f"process {index} of {self._count} (on {host})"

  def _end(self, verdict: ending.Verdict, *, told: bool = False) -> None:
    """Tells the others, writes what there is to know, and ends the process."""
    if self._state == "failed":
      return None  # It ends by itself, and says why.
    for link in self._links.values():
      if not told:
        link.send({"verdict": verdict._asdict()})
    path = self._write_stacks(verdict.why) if verdict.kind == "stalled" else None
    _say(self._line(verdict, path))
    leader = None if self._met is None else self._met.leader
    if self._limits.folder is not None:
      first = self._index == (1 if verdict.index == 0 and not self.is_alone else 0)
      ending.in_time(
        ending.write_status, self._limits.folder, verdict, leader, wait=0.0 if first else 1.0
      )
    self._switch.disarm()
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

  def _line(self, verdict: ending.Verdict, path: epath.Path | None) -> str:
    line = verdict.why
    if verdict.index != self._index:
      line += f"; so {self._named(self._index)} ends too"
    line += f" (status {verdict.status})"
    if verdict.status == ending.TEMPORARY:
      line += ". Started again, the job goes on from its newest checkpoint"
    if path is not None:
      line += f". Stacks: {path}"
    if verdict.kind == "stalled" and (calls := stacks.of_main_thread()):
      line += f". The main thread of this process is in:\n{calls}"
      return line
    return f"{line}."

  def _write_stacks(self, why: str, *, periodic: bool = False) -> epath.Path | None:
    """Writes the stacks into the folder of the run, if there is one and it takes them."""
    folder = self._limits.folder
    if folder is None:
      return None
    heading = [
      f"{self._named(self._index)}, pid {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}",
      f"why: {why}",
      f"now: {progress.OWN.now}, without progress for {self._age:.1f} s",
      "the last phases of this process:",
      *progress.OWN.recent(),
    ]
    write = stacks.write_periodic if periodic else stacks.write
    return ending.in_time(write, folder, self._index, stacks.text(heading))


def _bytes_moved() -> int:
  """Returns how many bytes this process has read and written by system calls, 0 if unknown."""
  try:
    with open("/proc/self/io") as file:
      counts = dict(line.split(": ") for line in file)
  except OSError:
    return 0
  return int(counts["rchar"]) + int(counts["wchar"])


def _say(text: str):
  with contextlib.suppress(OSError, ValueError):
    print(f"paxlike: {text}", file=sys.stderr, flush=True)


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
  """Context of work that must go on; gives the watch, which is made for it where there is none."""
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
