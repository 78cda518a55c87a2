# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of a job's processes at process 0, before JAX's own: checks that their flags match.

Process 0 listens on the coordinator port until all processes have connected, then frees it for
JAX's coordinator. The connections stay open for the heartbeats of `job_watch`. Messages are lines
of JSON.
"""

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from paxlike.errors import TemporaryError, UserError, one_line
from paxlike.processes import cluster

_LONGEST = 2**20  # Bytes of a line.
_HELLO_SECONDS = 10.0  # Time-out for the first message of a connection.
_MAX_REJECTIONS = 10  # Number of rejected connections that are printed.
_ALIVE = 5.0  # Seconds between heartbeats of process 0 while it waits.


class Connections(NamedTuple):
  """The result of a rendezvous. Process 0 knows all processes; others know it and themselves.

  Attributes:
    links: Process -> connection: to process 0, or from it to each other process.
    hosts: Process -> host name, of each known process.
    leader: Host and process id of process 0.
  """

  links: "dict[int, Link]"
  hosts: dict[int, str]
  leader: tuple[str, int]


class Link:
  """A connection on which both sides send JSON objects."""

  def __init__(self, connection: socket.socket):
    connection.settimeout(2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self.socket = connection
    self.closed = False
    self._rest = b""

  def fileno(self) -> int:
    """Returns the socket's file descriptor, for `select`."""
    return self.socket.fileno()

  def send(self, message: Mapping[str, Any]):
    """Sends a message; closes the link on failure."""
    try:
      self.socket.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
      self.closed = True

  def receive(self) -> list[dict[str, Any]]:
    """Returns the messages received; reads once, and may block.

    Malformed data closes the link.
    """
    try:
      data = self.socket.recv(2**16)
    except TimeoutError:
      return []
    except OSError:
      data = b""
    *lines, self._rest = (self._rest + data).split(b"\n")
    if not data or len(self._rest) > _LONGEST:
      self.closed = True
    messages = []
    for line in lines:
      try:
        message = json.loads(line)
      except (ValueError, RecursionError):
        message = None
      if not isinstance(message, dict):
        self.closed = True
        break
      messages.append(message)
    return messages

  def close(self):
    """Ends the connection."""
    self.closed = True
    with contextlib.suppress(OSError):
      self.socket.close()


def meet(
  group: cluster.ProcessGroup, flags: Mapping[str, str], *, timeout: float, every: float = 30.0
) -> Connections:
  """Returns when all processes of the group have connected.

  Args:
    group: The processes.
    flags: Flags and versions that must be equal in all processes.
    timeout: Seconds that all processes have to connect.
    every: Seconds between lines about missing processes.

  Raises:
    UserError: Two processes have the same index, or one has other flags than process 0.
    TemporaryError: Some do not connect in time.
  """
  mine = {
    "paxlike": 1,
    "index": group.index,
    "count": group.count,
    "flags": dict(flags),
    "host": socket.gethostname(),
    "pid": os.getpid(),
  }
  if group.index == 0:
    return _Host(group, mine, timeout=timeout, every=every).wait()
  return _join(group, mine, timeout=timeout, every=every)


def ready(files: Iterable[Any], seconds: float) -> set[Any]:
  """Returns the sockets and links that can be read; waits for the first up to `seconds`."""
  poll = select.poll()  # `select.select` takes no file descriptor above 1023.
  by_number = {one.fileno(): one for one in files}
  for number in by_number:
    poll.register(number, select.POLLIN)
  return {by_number[number] for number, _ in poll.poll(1000 * seconds)}


def named(indices: list[int], count: int) -> str:
  """Returns "process 1 of 4" or "processes 1, 3 of 4"."""
  some = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
  return f"process{'es' if len(indices) > 1 else ''} {some} of {count}"


def _split(address: str) -> tuple[str, int]:
  host, _, port = address.rpartition(":")
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise UserError(f"{address} is not an address of process 0: expected HOST:PORT.")
  return host.strip("[]"), int(port)


def _say(text: str):
  print(f"paxlike: {text}", file=sys.stderr, flush=True)


class _Host:
  """Process 0's side of the rendezvous."""

  def __init__(
    self, group: cluster.ProcessGroup, mine: dict[str, Any], *, timeout: float, every: float
  ):
    self._group, self._mine, self._timeout, self._every = group, mine, timeout, every
    self._began = time.monotonic()
    self._members: dict[int, tuple[Link, dict[str, Any]]] = {}
    self._unknown: dict[Link, float] = {}  # Connections without a first message, and since when.
    self._said: set[str] = set()  # Reasons of rejections, each printed once.

  def wait(self) -> Connections:
    """Returns when all processes have connected."""
    try:
      self._wait()
    finally:
      for link in self._unknown:
        link.close()
    hosts = {index: hello["host"] for index, (_, hello) in self._members.items()}
    hosts[0] = self._mine["host"]
    links = {index: link for index, (link, _) in self._members.items()}
    for link in links.values():
      link.send({"go": [self._mine["host"], self._mine["pid"]]})
    return Connections(links, hosts, (self._mine["host"], self._mine["pid"]))

  def _wait(self):
    said = signed = self._began
    with self._listen() as listener:
      while missing := self._missing():
        now = time.monotonic()
        if now - self._began > self._timeout:
          line = f"{named(missing, self._group.count)} did not connect to {self._group.address}"
          line += f" within {self._timeout:.0f} s (--join_timeout)."
          self._end(line, status=75)
          raise TemporaryError(line)
        if now - said > self._every:
          said = now
          _say(f"waiting for {named(missing, self._group.count)}, for {now - self._began:.0f} s")
        if now - signed > min(_ALIVE, self._every):
          signed = now
          for link, _ in self._members.values():
            link.send({"missing": missing})
        self._step(listener)

  def _missing(self) -> list[int]:
    return [index for index in range(1, self._group.count) if index not in self._members]

  def _listen(self) -> socket.socket:
    """Returns the listening socket; retries while a job that is ending still uses the port."""
    _, port = _split(self._group.address)
    said = self._began
    while True:
      try:
        # Both IPv6 and IPv4, if supported.
        both = socket.has_dualstack_ipv6()
        kind = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=kind, dualstack_ipv6=both, backlog=1024)
      except OSError as error:
        if error.errno != errno.EADDRINUSE:
          raise UserError(f"cannot listen on port {port}: {error.strerror}.") from None
      now = time.monotonic()
      self._ask_who_listens(port)
      if now - self._began > self._timeout:
        raise TemporaryError(
          f"port {port} of process 0 has been in use for {self._timeout:.0f} s (--join_timeout) by"
          " another job or program: set another port."
        )
      if now - said > self._every:
        said = now
        _say(f"port {port} has been in use for {now - self._began:.0f} s: waiting until it is free")
      time.sleep(0.5)

  def _ask_who_listens(self, port: int):
    """Raises a UserError if another process 0 of this job listens at the port."""
    with contextlib.suppress(OSError):
      link = Link(socket.create_connection(("localhost", port), timeout=2))
      try:
        link.send(self._mine)
        for message in link.receive():
          if isinstance(line := message.get("end"), str):
            raise UserError(line)
      finally:
        link.close()

  def _step(self, listener: socket.socket):
    """Handles connections and messages for half a second."""
    known = {link: index for index, (link, _) in self._members.items()}
    can_read = ready([listener, *self._unknown, *known], 0.5)
    now = time.monotonic()
    for one in can_read:
      if one is listener:
        self._unknown[Link(listener.accept()[0])] = now
        continue
      assert isinstance(one, Link)
      if one in known:
        one.receive()
        if one.closed:  # The process has ended meanwhile, and may be started again.
          one.close()
          del self._members[known[one]]
      else:
        for message in one.receive()[:1]:
          del self._unknown[one]
          self._greet(one, message)
    for link, since in list(self._unknown.items()):
      if link.closed or now - since > _HELLO_SECONDS:
        link.close()
        del self._unknown[link]

  def _greet(self, link: Link, hello: dict[str, Any]):
    """Accepts a process, or rejects it with a reason.

    Raises:
      UserError: It has other flags than this process.
    """
    if not _is_hello(hello):
      self._reject(link, f"a connection to {self._group.address} is not from a process of a job")
      return
    index, count = hello["index"], self._group.count
    where = f"process {index} (on {hello['host']}, pid {hello['pid']})"
    joined = {0: self._mine} | {other: theirs for other, (_, theirs) in self._members.items()}
    if not 0 <= index < count:
      line = f"{where} does not belong to this job: {_difference(hello, self._mine)}."
      self._reject(link, f"a process connected with an index outside of 0 to {count - 1}", line)
    elif index in joined:
      first = f"on {joined[index]['host']}, pid {joined[index]['pid']}"
      line = f"{where} connected, but process {index} of {count} has already joined ({first})."
      self._reject(link, line, f"{line} Give each process its own index (--host_idx).")
    elif differs := _difference(hello, self._mine):
      line = f"{where} has other flags than process 0: {differs}."
      link.send({"end": line, "status": 2})
      link.close()
      self._end(line, status=2)
      raise UserError(line)
    else:
      self._members[index] = (link, hello)

  def _reject(self, link: Link, why: str, line: str = ""):
    """Closes a connection; sends `line` to the other side, if it is a process of paxlike."""
    if line:
      link.send({"end": line, "status": 2})
    link.close()
    if why not in self._said and len(self._said) < _MAX_REJECTIONS:
      self._said.add(why)
      _say(f"{why}. It is rejected.")

  def _end(self, line: str, *, status: int):
    for link, _ in self._members.values():
      link.send({"end": line, "status": status})
      link.close()


def _is_hello(message: dict[str, Any]) -> bool:
  """Returns whether a message is a valid first message of a process."""
  kinds = {"index": int, "count": int, "flags": dict, "host": str, "pid": int}
  if any(type(message.get(name)) is not kind for name, kind in kinds.items()):
    return False
  is_plain = one_line(message["host"], limit=100) == message["host"]
  return is_plain and all(isinstance(text, str) for text in message["flags"].values())


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
  """Returns how the group or flags of two processes differ; "" if they do not."""
  if theirs["count"] != ours["count"]:
    return f"it belongs to {theirs['count']} processes, process 0 to {ours['count']}"
  if not 0 < theirs["index"] < ours["count"]:
    return f"the job has {ours['count']} processes"
  return difference(theirs["flags"], ours["flags"])


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
  """Returns the first difference of two mappings as text; "" if they are equal."""
  for name in [*ours, *theirs]:
    if theirs.get(name) != ours.get(name):
      both = (theirs, ours)
      said = [f"{name}={one[name]}" if name in one else f"no {name}" for one in both]
      return f"{one_line(said[0], limit=200)} there, {one_line(said[1], limit=200)} here"
  return ""


def _join(
  group: cluster.ProcessGroup, mine: dict[str, Any], *, timeout: float, every: float
) -> Connections:
  """Connects to process 0; retries, since it may start later."""
  host, port = _split(group.address)
  began = said = time.monotonic()
  reason = "it does not answer"
  while True:
    try:
      link = Link(socket.create_connection((host, port), timeout=5))
    except OSError as error:
      reason = error.strerror or str(error)
    else:
      connections = _talk(link, group, mine)
      if connections is not None:
        return connections
      link.close()
      reason = "a job that has already started, or another program, listens there"
    now = time.monotonic()
    if now - began > timeout:
      raise TemporaryError(
        f"process 0 of {group.count} did not answer at {group.address} within {timeout:.0f} s"
        f" (--join_timeout): {reason}. This is process {group.index}."
      )
    if now - said > every:
      said = now
      _say(
        f"waiting for process 0 of {group.count} at {group.address}, for {now - began:.0f} s:"
        f" {reason}"
      )
    time.sleep(0.2)


def _talk(link: Link, group: cluster.ProcessGroup, mine: dict[str, Any]) -> Connections | None:
  """Returns when all have joined; None if the other side is not a process 0 that is waiting."""
  link.send(mine)
  heard = time.monotonic()
  while not link.closed and time.monotonic() - heard < 4 * _ALIVE:
    for message in link.receive():
      heard = time.monotonic()
      match message:
        case {"go": [str(leader), int(pid)]}:
          hosts = {0: one_line(leader), group.index: mine["host"]}
          return Connections({0: link}, hosts, (leader, pid))
        case {"end": str(line), "status": int(status)}:
          link.close()
          raise (UserError if status == 2 else TemporaryError)(line)
  return None
