# SPDX-License-Identifier: Apache-2.0
"""A job of which a process is stuck, lost or has failed ends, and says because of whom."""

import concurrent.futures
import signal
import socket
from typing import Any

import pytest
from etils import epath

from paxlike.errors import UserError
from paxlike.processes import job_watch, phases, rendezvous, stack_traces, verdicts


def connection() -> tuple[socket.socket, socket.socket]:
  with socket.create_server(("localhost", 0)) as server:
    there = socket.create_connection(server.getsockname())
    return server.accept()[0], there


@pytest.fixture
def job(monkeypatch):
  """Gives watches of a job, connected and without their threads; ends the links afterwards."""
  watches: list[job_watch.Watch] = []
  monkeypatch.setattr(phases, "OWN", phases.Progress())

  def make(count: int, **options) -> list[job_watch.Watch]:
    pairs = [connection() for _ in range(count - 1)]
    hosts = {index: f"host{index}" for index in range(count)}
    links = {index + 1: rendezvous.Link(pair[0]) for index, pair in enumerate(pairs)}
    leader = ("host0", 1)
    found = [job_watch.Watch(rendezvous.Connections(links, hosts, leader), count=count, **options)]
    for index, pair in enumerate(pairs, 1):
      connections = rendezvous.Connections({0: rendezvous.Link(pair[1])}, hosts, leader)
      found.append(job_watch.Watch(connections, index=index, count=count, **options))
    watches.extend(found)
    return found

  yield make
  for one in watches:
    for link in one._links.values():
      link.close()
    one._wake.close()
    one._waker.close()
    one._stall.close()


def report(number: int, *, age: float = 0.0, over: bool = False, **more) -> dict:
  base = {"number": number, "what": f"phase {number}", "age": age, "over": over, "state": ""}
  return base | more


def judged(hub: job_watch.Watch, *reports: dict, tick: float = 0.1) -> verdicts.Verdict | None:
  """What process 0 finds when processes report; the first report is its own."""
  for index, one in enumerate(reports[1:], 1):
    hub._take(index, one)
  return hub._judge(reports[0], tick)


def test_who_is_behind_is_stuck_and_not_who_waits_for_it(job):
  hub, *_ = job(3)
  long = {"age": 99.0, "over": True}
  verdict = judged(hub, report(8, **long), report(7, **long), report(8, **long))
  assert verdict == ("stalled", 1, "process 1 of 3 (on host1) is stuck: phase 7, for 99 s")
  # The others are past their limits, but it is not: it may compile.
  assert judged(hub, report(8, **long), report(7), report(8, **long)) is None
  # All in one phase: the one that is longest in it, unless it waits for the others.
  verdict = judged(hub, report(8, age=9, over=True), report(8, **long), report(8, age=7, over=True))
  assert verdict is not None and verdict.index == 1 and verdict.why.endswith("other processes")
  verdict = judged(hub, report(8, age=9, over=True), report(8, waits=True, **long), report(9))
  assert verdict is not None and verdict.index == 0
  # Who has left is not waited for.
  left = report(2, state="left", **long)
  assert judged(hub, report(8), left, report(8)) is None


def test_a_process_without_a_sign_is_lost_and_one_that_ends_at_once(job):
  hub, one, _ = job(3, timeout=10)
  assert judged(hub, report(1), report(1), report(1)) is None
  hub._take(2, report(1))
  verdict = hub._judge(report(1), 11)
  assert verdict is not None and verdict.kind == "lost" and verdict.status == 75
  assert "process 1 of 3 (on host1) sent no heartbeat for 11 s" in verdict.why
  hub._members[1].silent = hub._members[2].silent = 0
  one._links[0].close()
  for message in hub._links[1].receive():
    hub._take(1, message)
  verdict = hub._judge(report(1), 0.1)
  assert verdict is not None and verdict.index == 1 and "was killed" in verdict.why


def test_others_find_themselves_that_process_0_is_gone(job):
  hub, one = job(2, timeout=10)
  assert one._judge(report(1), 1) is None
  hub._send(report(1, stop=False, reason=""))
  for message in one._links[0].receive():
    one._take(0, message)
  verdict = one._judge(report(1), 11)
  assert verdict is not None and "process 0 of 2 (on host0) sent no heartbeat" in verdict.why
  hub._links[1].close()
  one._links[0].receive()
  verdict = one._judge(report(1), 0)
  assert verdict is not None and verdict.index == 0


def test_a_failure_ends_the_others_a_little_later(job):
  """They may fail of the same, and say so themselves."""
  hub, _ = job(2)
  stuck = report(1, age=99, over=True)
  failed = report(1, state="failed", reason="KeyError: 'bad record'")
  assert judged(hub, stuck, failed) is None
  hub._links[1].closed = True  # It has ended.
  verdict = hub._judge(stuck, 3)
  assert verdict == ("failed", 1, "process 1 of 2 (on host1) has failed: KeyError: 'bad record'")
  assert verdict.status == 1


def test_a_failure_of_jax_may_be_that_of_another_process(job):
  lost: dict[str, Any] = {
    "state": "failing",
    "reason": "JaxRuntimeError: connection closed by peer",
  }
  hub, *_ = job(3, timeout=10)
  # No sign since of process 2: it may be gone.
  assert judged(hub, report(5), report(5, **lost), report(5)) is None
  stuck = report(5, age=99, over=True)
  assert hub._judge(stuck, 4) is None
  hub._take(1, report(5, **lost))
  verdict = hub._judge(stuck, 7)
  assert verdict is not None and (verdict.kind, verdict.index) == ("lost", 2)
  # All others are there, so it is that process itself; also where it is process 0.
  hub, *_ = job(3, timeout=100)
  assert judged(hub, report(5), report(5, **lost), report(5)) is None
  assert hub._judge(stuck, 4) is None
  hub._take(2, report(5))
  verdict = hub._judge(stuck, 0.1)
  assert verdict is not None and (verdict.kind, verdict.index) == ("failed", 1)
  hub, *_ = job(3, timeout=100)
  assert judged(hub, report(5, **lost), report(5), report(5)) is None
  verdict = judged(hub, report(5, **lost), report(5), report(5), tick=3)
  assert verdict is not None and (verdict.kind, verdict.index) == ("failed", 0)
  # One has failed of itself: what JAX says in the others follows from it.
  hub, *_ = job(3, timeout=100)
  failed = report(5, state="failed", reason="no such file")
  verdict = judged(hub, report(5, **lost), report(5, **lost), failed, tick=3)
  assert verdict is not None and (verdict.kind, verdict.index) == ("failed", 2)
  assert not hub._is_to_blame.is_set()
  # A process that JAX has waited for in vain is the stuck one.
  hub, *_ = job(3, timeout=100)
  late: dict[str, Any] = {
    "state": "failing",
    "reason": "JaxRuntimeError: DEADLINE_EXCEEDED: GetKeyValue()",
  }
  assert judged(hub, report(5, **late), report(4), report(5), tick=9) is None
  verdict = judged(hub, report(5, **late), report(4, age=60, over=True), report(5, **late))
  assert verdict is not None and (verdict.kind, verdict.index) == ("stalled", 1)


def test_a_failed_process_that_waits_for_others_that_have_ended_ends_too(job, monkeypatch, capsys):
  """As where it waits for them in a save."""
  ended = []
  monkeypatch.setattr(stack_traces, "exit_at_once", ended.append)
  hub, one = job(2)
  one.fail(UserError("no such file"))
  one._end_if_abandoned(30)
  assert not ended
  hub._links[1].close()
  one._links[0].receive()
  one._end_if_abandoned(1)
  assert ended == [1]
  assert capsys.readouterr().err == "paxlike: process 1 of 2 (on host1) has failed: no such file.\n"


def test_where_jax_fails_in_all_processes_each_may_say_so(job):
  hub, one = job(2)
  same: dict[str, Any] = {"state": "failing", "reason": "JaxRuntimeError: out of memory"}
  assert judged(hub, report(5, **same), report(5, **same)) is None
  for message in one._links[0].receive():
    one._take(0, message)
  assert hub._is_to_blame.is_set() and one._is_to_blame.is_set()


def test_what_has_failed_is_said_with_its_kind(job):
  (_, one) = job(2)
  one.fail(KeyError("bad record"))
  one.fail(UserError("what followed from it"))
  assert (one._state, one._reason) == ("failed", "KeyError: 'bad record'")
  for error, words in (
    (UserError("no such file."), "no such file"),
    (KeyboardInterrupt(), "interrupted (Ctrl-C)"),
    (NotImplementedError(), "NotImplementedError"),
  ):
    assert verdicts.reason(error) == words


def test_processes_compare_what_they_are_given_and_wait_for_each_other(job):
  """With their threads, as all three main threads wait."""
  watches = job(3)
  for one in watches:
    one.start()
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    for given in ([{"a": "1"}] * 3, [{}] * 3):
      list(pool.map(lambda one, values: one.compare(values), watches, given))

    def differs(one: job_watch.Watch, values: dict[str, str]) -> str:
      with pytest.raises(UserError) as found:
        one.compare(values)
      return str(found.value)

    said = set(pool.map(differs, watches, [{"a": "1"}, {"a": "1"}, {"a": "2", "b": "\x1b[31m"}]))
  (line,) = said
  assert line.startswith("process 2 of 3 (on host2) has another graph than process 0: a=2 there")
  for one in watches:
    one._closed.set()
    one._stir()
    one.join()


def test_all_stop_at_the_last_of_the_places_that_were_promised(job):
  hub, one = job(2)
  assert not hub.stops_here(4) and not one.stops_here(5)
  one._stopping.asked.set()
  one._observe(0.1)
  hub._take(1, one._report())
  hub._observe(0.1)
  assert (hub._stopping.promised, one._stopping.promised) == (5, 6)
  assert hub._judge(hub._report(), 0.1) is None
  hub._send(hub._report())
  for message in one._links[0].receive():
    one._take(0, message)
  assert [hub.stops_here(5), hub.stops_here(6), one.stops_here(6)] == [False, True, True]


def test_who_was_suspended_is_not_stuck(job):
  """The watch was so too: a tick counts two polls at most, however long it took."""
  (alone,) = job(1)
  alone._limits = job_watch.Limits(stall_timeout=30.0)
  phases.OWN.enter("step", 1)
  for _ in range(3):
    alone._observe(2 * alone._poll)
  assert not alone._stall.is_over and alone._stall.age < 30
  alone._observe(31.0)
  assert alone._stall.is_over
  phases.OWN.enter("data", 2)
  alone._observe(1.0)
  assert not alone._stall.is_over


def test_work_that_is_watched_can_be_left(tmp_path):
  with job_watch.watching(job_watch.Limits(epath.Path(tmp_path), None, None)) as one:
    assert job_watch.current() is one and one.is_alive()
  assert job_watch.current() is None and not one.is_alive()


def test_work_within_watched_work_leaves_its_folder_and_not_its_limits(tmp_path):
  signals, other = [signal.getsignal(signal.SIGUSR1)], epath.Path(tmp_path / "other")
  with job_watch.watching(job_watch.Limits(stall_timeout=7.0)) as one:
    signals.append(signal.getsignal(signal.SIGUSR1))
    with job_watch.watching(job_watch.Limits(epath.Path(tmp_path), 0.0, None)) as inner:
      assert one is inner and one._limits.stall_timeout == 0
    assert one._limits == (epath.Path(tmp_path), 7.0, None)
    assert signal.getsignal(signal.SIGUSR1) is signals[1]
    with one.watching(job_watch.Limits(stall_timeout=3.0)), one.watching(job_watch.Limits(other)):
      pass
    assert one._limits == (other, 7.0, None)  # For the status of a job that fails.
    signal.raise_signal(signal.SIGUSR1)  # It would end the process if nothing printed the stacks.
  assert signal.getsignal(signal.SIGUSR1) is signals[0]
