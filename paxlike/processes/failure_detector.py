# SPDX-License-Identifier: Apache-2.0
"""Decides from the reports of a job's processes whether one is lost, has failed or is stuck.

Process 0 knows all processes; the others know only process 0. Nothing here waits, sends messages or
reads a clock.
"""

from collections.abc import Collection, Mapping
from typing import Any

from paxlike.processes import rendezvous, verdicts

LEFT = 2**62  # The phase count of a process whose work is done.
FAILED_AFTER = 2.0  # Seconds from a process's failure until it ends the other processes.


class Member:
  """One process.

  Attributes:
    report: Its last report, from `Watch._report` in `job_watch`.
    silent: Seconds since its last message.
    failed: Seconds since it reported a failure.
    given: How many times it has sent values to compare, and the last values.
  """

  def __init__(self):
    self.report: dict[str, Any] = {"number": 0, "state": "", "what": "starting", "over": False}
    self.silent = 0.0
    self.failed = 0.0
    self.given: tuple[int, Mapping[str, str]] = (0, {})

  @property
  def state(self) -> str:
    """`failing`, `failed`, `left`, or "" while it works.

    `failing` is an error of JAX, which another process may have caused.
    """
    return self.report["state"]

  @property
  def reason(self) -> str:
    """Why it fails."""
    return self.report.get("reason") or "unknown"


class Members:
  """The processes that process `index` of `count` knows."""

  def __init__(self, hosts: Mapping[int, str], *, index: int, count: int, timeout: float):
    """A process without a heartbeat for `timeout` seconds counts as lost."""
    self._hosts, self._index, self._count, self._timeout = hosts, index, count, timeout
    self._known = {i: Member() for i in range(count if index == 0 else 1)}

  def __getitem__(self, index: int) -> Member:
    return self._known[index]

  def named(self, index: int) -> str:
    """Returns the name of a process in messages."""
    host = self._hosts.get(index, "?")
    if self._count == 1:
      return f"this process (on {host})"
    return f"process {index} of {self._count} (on {host})"

  def take(self, index: int, message: dict[str, Any]):
    """Handles a message of process `index`."""
    member = self._known[index]
    member.silent = 0.0
    if "number" in message:
      member.report = message
    elif "state" in message:
      member.report |= message
    elif "given" in message:
      member.given = (message["round"], message["given"])

  def judge(
    self, report: dict[str, Any], tick: float, *, closed: Collection[int] = ()
  ) -> verdicts.Verdict | None:
    """Returns the verdict; None: the job continues.

    Args:
      report: This process's report.
      tick: Seconds since the last call.
      closed: Processes whose connection is closed.
    """
    if self._index == 0:
      self._known[0].report = report
    for index, member in self._known.items():
      member.silent += 0 if index == self._index else tick
      member.failed += tick if member.state in ("failing", "failed") else 0
    for index, member in self._known.items():
      if index != self._index and (found := self._lost(index, member, index in closed)):
        return found
    for index, member in self._known.items():
      if self._is_failure(index, member, index in closed):
        return verdicts.Verdict("failed", index, f"{self.named(index)} has failed: {member.reason}")
    return None if self._index else self._stuck()

  def _lost(self, index: int, member: Member, is_closed: bool) -> verdicts.Verdict | None:
    if member.state == "failed" or (member.state == "left" and is_closed):
      return None
    if is_closed and member.state != "failing":
      why = f"{self.named(index)} was killed: its connection closed without a message"
      return verdicts.Verdict("lost", index, why)
    if member.silent > self._timeout and not is_closed:
      why = f"{self.named(index)} sent no heartbeat for {member.silent:.0f} s (--heartbeat_timeout)"
      return verdicts.Verdict("lost", index, why)
    return None

  def _is_failure(self, index: int, member: Member, is_closed: bool) -> bool:
    """Returns whether a process is itself the cause of its failure.

    An error of JAX may be due to a lost process, so it counts only after every working process has
    sent a message since. A time-out of JAX does not count: another process may be stuck.
    """
    if member.state == "failed":
      return index != self._index and member.failed > FAILED_AFTER
    if member.state != "failing" or self._index:
      return False
    if is_closed:
      return True
    others = [one for i, one in self._known.items() if one.state in ("", "failed")]
    return (
      member.failed > FAILED_AFTER
      and not verdicts.is_timeout(member.reason)
      and not self.all_fail()
      and all(one.state == "" and one.silent < member.failed for one in others)
    )

  def all_fail(self) -> bool:
    """Returns whether JAX has failed in all processes that have not left."""
    return {member.state for member in self._known.values()} - {"left"} == {"failing"}

  def _stuck(self) -> verdicts.Verdict | None:
    """Returns the verdict on the process that the others wait for, if that is stuck itself."""
    failed = [one for one in self._known.values() if one.state in ("failing", "failed")]
    working = {i: one.report for i, one in self._known.items() if one.state == ""}
    if not working or not all(verdicts.is_timeout(one.reason) for one in failed):
      return None
    least = min(one["number"] for one in working.values())
    behind = {i: one for i, one in working.items() if one["number"] == least}
    stuck = {i: one for i, one in behind.items() if one["over"]}
    if not stuck:
      return None
    # Of those in the same phase, prefer one that does not wait in a collective, then the oldest.
    index = max(stuck, key=lambda i: (not stuck[i].get("waits"), stuck[i]["age"]))
    one = stuck[index]
    asked = " and was asked to stop" if one.get("stop") else ""
    why = f"{self.named(index)} is stuck{asked}: {one['what']}, for {one['age']:.0f} s"
    why += ", as are all other processes" if len(behind) == self._count > 1 else ""
    return verdicts.Verdict("stalled", index, why)

  def last_promised(self) -> int | None:
    """Returns the latest sync point that a process proposes for a stop (`StopAgreement`).

    None: not all working processes have proposed one.
    """
    points = [m.report.get("next") for m in self._known.values() if m.state == ""]
    if not points or None in points:
      return None
    return max(point for point in points if point is not None)

  def compared(self, times: int) -> str | None:
    """Returns how a process's values differ from process 0's in round `times` of comparing.

    "": all are equal; None: not all have sent theirs.
    """
    if any(member.given[0] < times for member in self._known.values()):
      return None
    for index, member in self._known.items():
      if differs := rendezvous.difference(member.given[1], self._known[0].given[1]):
        return f"{self.named(index)} has another graph than process 0: {differs}"
    return ""
