# SPDX-License-Identifier: Apache-2.0
"""Processes, here threads, that meet, or learn in one line why they do not."""

import concurrent.futures
import fcntl
import json
import re
import resource
import socket

import pytest

from paxlike.cli import command_line, flags
from paxlike.errors import TemporaryError, UserError
from paxlike.processes import cluster, rendezvous


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def links(group: cluster.ProcessGroup, flags: dict[str, str], *, timeout: float = 20) -> list[int]:
  """Returns with whom a process is connected after they have met."""
  met = rendezvous.meet(group, flags, timeout=timeout, every=0.5)
  for link in met.links.values():
    link.close()
  return sorted(met.links)


def together(*members: tuple[int, int, dict[str, str]], timeout: float = 3) -> list:
  """Returns what becomes of processes (index, count, flags) that come to one place."""
  port = free_port()

  def one(member: tuple[int, int, dict[str, str]]):
    index, count, given = member
    try:
      return links(cluster.ProcessGroup(f"localhost:{port}", count, index), given, timeout=timeout)
    except (UserError, TemporaryError) as error:
      return error

  with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
    return list(pool.map(one, members))


def test_all_meet_at_process_0():
  same = {"--fdl.A": "1"}
  assert together((2, 3, same), (0, 3, same), (1, 3, same)) == [[0], [1, 2], [0]]


def test_who_does_not_come_is_named(capfd):
  zero, two = together((0, 4, {}), (2, 4, {}), timeout=2)
  for error in (zero, two):
    assert type(error) is TemporaryError
    assert re.match(r"processes 1, 3 of 4 did not connect to \S+:\d+ within 2 s", str(error))
  assert "paxlike: waiting for processes 1, 3 of 4, for " in capfd.readouterr().err
  (alone,) = together((1, 2, {}), timeout=1)
  assert type(alone) is TemporaryError
  assert re.match(r"process 0 of 2 did not answer at \S+:\d+ within 1 s", str(alone))
  assert "paxlike: waiting for process 0 of 2 at localhost" in capfd.readouterr().err


@pytest.mark.parametrize(
  ("count", "given", "reason"),
  [
    (3, {"--fdl.A": "1"}, "it belongs to 3 processes, process 0 to 2"),
    (2, {"--fdl.A": "2"}, "--fdl.A=2 there, --fdl.A=1 here"),
    (2, {}, "no --fdl.A there, --fdl.A=1 here"),
    (2, {"--fdl.A": "1", "--fdl.B": "3"}, "--fdl.B=3 there, no --fdl.B here"),
  ],
)
def test_who_was_given_other_flags_is_named(count, given, reason):
  for error in together((0, 2, {"--fdl.A": "1"}), (1, count, given)):
    assert type(error) is UserError
    assert str(error).startswith("process 1 (on ") and reason in str(error)


def test_who_comes_twice_is_turned_away_and_the_others_meet():
  """Of the two, one is rejected as long as the job waits for process 2."""
  port = free_port()
  group = cluster.ProcessGroup(f"localhost:{port}", 3, 0)

  def come(index: int):
    try:
      return links(group._replace(index=index), {})
    except UserError as error:
      return str(error)

  with concurrent.futures.ThreadPoolExecutor(5) as pool:
    first = [pool.submit(come, index) for index in (0, 1, 1)]
    refused = next(concurrent.futures.as_completed(first)).result()
    assert "connected, but process 1 of 3 has already joined" in refused and "--host_idx" in refused
    assert "process 0 " in come(0)
    assert come(2) == [0]
    met = [future.result() for future in first]
  assert sorted(x for x in met if isinstance(x, list)) == [[0], [1, 2]]


def test_strangers_are_not_taken_for_processes(capfd):
  """A scan of ports, say, or a client of another protocol; they do not end the wait."""
  port = free_port()
  group = cluster.ProcessGroup(f"localhost:{port}", 2, 0)
  hello = {"index": 1, "count": 2, "flags": {}, "host": "a", "pid": 1}
  odd = [{"index": 7}, {"index": -1}, {"index": True}, {"count": 1.0}, {"flags": {"a": []}}]
  odd += [{"index": 7, "count": 8}, {"host": "a\nb\x1b[31m"}]
  texts = [b"", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"index": 1}\n', b"\xff\n"]
  texts += [b"[" * 200_000 + b"\n", *(json.dumps(hello | one).encode() + b"\n" for one in odd)]
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    host = pool.submit(links, group, {})
    for text in texts:
      while True:
        try:
          with socket.create_connection(("localhost", port)) as stranger:
            stranger.sendall(text)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            while stranger.recv(4096):
              pass
          break
        except ConnectionRefusedError:
          pass
        except ConnectionResetError:
          break
    assert links(group._replace(index=1), {}) == [0]
    assert host.result() == [1]
  lines = [line for line in capfd.readouterr().err.splitlines() if "rejected" in line]
  assert len(lines) == 2 and "\x1b" not in "".join(lines)


def test_files_of_large_numbers_can_be_waited_for():
  """As those of process 0 of a thousand."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if hard < 2048:
    pytest.skip("the system allows too few files")
  resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
  one, other = socket.socketpair()
  high = socket.socket(fileno=fcntl.fcntl(one, fcntl.F_DUPFD, 1500))
  with one, other, high:
    assert rendezvous.ready([high], 0) == set()
    other.send(b"x")
    assert rendezvous.ready([high], 1) == {high}
  resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_of_another_program_is_said():
  with socket.create_server(("", 0)) as other:
    address = f"localhost:{other.getsockname()[1]}"
    with pytest.raises(TemporaryError, match="has been in use for 1 s"):
      rendezvous.meet(cluster.ProcessGroup(address, 2, 0), {}, timeout=1)
  for address in ("localhost", ":1", "a:b", "a:0", "a:70000"):
    with pytest.raises(UserError, match="expected HOST:PORT"):
      rendezvous.meet(cluster.ProcessGroup(address, 2, 1), {}, timeout=1)


def test_flags_that_may_differ_are_not_compared():
  own = ["--host_idx=1", "--server_addr=a:1", "--num_hosts=2", "--job_log_dir=/here"]
  same = ["paxlike", "--exp=A", "--fdl.B=1", "--fdl.DATA_PATH=/x"]
  given = flags.shared(command_line.parse([*same, *own]))
  assert given["--fdl.B"] == "1" and given["--fdl_config"] == "A"
  assert not [name for name in given if "PATH" in name or name in ("--host_idx", "--server_addr")]
