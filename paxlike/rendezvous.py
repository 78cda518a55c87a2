# SPDX-License-Identifier: Apache-2.0
"""The processes of a job meet at process 0 before JAX connects them, and find what does not fit.

Process 0 listens on the port of the job until all have come, and frees it then for JAX's service.
The connections stay: by them the processes know of each other's end (`watch`). Messages are JSON,
one a line.
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

from paxlike import cluster
from paxlike.errors import TemporaryError, UserError, one_line

_LONGEST = 2**20  # Bytes of a line.
_PATIENCE = 10.0  # Seconds in which who has connected says who it is.
_MOST_STRANGERS = 10  # That are printed.
_ALIVE = 5.0  # Seconds between two signs of process 0 while it waits.


class Met(NamedTuple):
  """The processes, all there. Process 0 knows all; the others know process 0 and themselves.

  Attributes:
    links: To process 0, or from it to each other process.
    hosts: The name of the machine of each process that this one knows.
    leader: Host and process id of process 0.
  """

  links: "dict[int, Link]"
  hosts: dict[int, str]
  leader: tuple[str, int]


class Link:
  """One connection, on which both sides send objects of JSON."""

  def __init__(self, connection: socket.socket):
    connection.settimeout(2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self.socket = connection
    self.closed = False
    self._rest = b""

  def fileno(self) -> int:
    """Of the socket, for `select`."""
    return self.socket.fileno()

  def send(self, message: Mapping[str, Any]):
    """Sends a message, if the other side still takes any."""
    try:
      self.socket.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
      self.closed = True

  def receive(self) -> list[dict[str, Any]]:
    """Returns the messages that have come; reads once, and may wait.

    What is no message closes the link.
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
  group: cluster.Group, flags: Mapping[str, str], *, timeout: float, every: float = 30.0
) -> Met:
  """Returns when all processes of the group are there.

  Args:
    group: The processes.
    flags: What must be the same in all of them: versions too.
    timeout: Seconds that they have.
    every: Seconds between two lines about who is missing.

  Raises:
    UserError: Another process has this one's index, or was given other flags than process 0.
    TemporaryError: Some do not come.
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
  """Returns which of some sockets and links can be read, as soon as one can or after a while."""
  poll = select.poll()  # `select.select` takes no file of a number above 1023.
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
    raise UserError(f"{address} is no address of process 0: expected HOST:PORT.")
  return host.strip("[]"), int(port)


def _say(text: str):
  print(f"paxlike: {text}", file=sys.stderr, flush=True)


class _Host:
  """Process 0, to which the others come."""

  def __init__(self, group: cluster.Group, mine: dict[str, Any], *, timeout: float, every: float):
    self._group, self._mine, self._timeout, self._every = group, mine, timeout, every
    self._began = time.monotonic()
    self._members: dict[int, tuple[Link, dict[str, Any]]] = {}
    self._unknown: dict[Link, float] = {}  # They have connected and not said who they are.
    self._said: set[str] = set()  # What is wrong with who is turned away: each is printed once.

  def wait(self) -> Met:
    """Returns when all have come."""
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
    return Met(links, hosts, (self._mine["host"], self._mine["pid"]))

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
    """Returns the listening socket. The port may still be one of a job that is just ending."""
    _, port = _split(self._group.address)
    said = self._began
    while True:
      try:
        # Also IPv4, where there is IPv6 at all.
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
          f"port {port} of process 0 is in use, for {self._timeout:.0f} s (--join_timeout): a job"
          " runs here already, or another program uses it. Give another port."
        )
      if now - said > self._every:
        said = now
        _say(f"port {port} is in use, for {now - self._began:.0f} s: waiting until it is free")
      time.sleep(0.5)

  def _ask_who_listens(self, port: int):
    """Raises a UserError if it is another process 0 of this job."""
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
    """Takes what comes within half a second."""
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
        if one.closed:  # It has ended before the others have come, and may come again.
          one.close()
          del self._members[known[one]]
      else:
        for message in one.receive()[:1]:
          del self._unknown[one]
          self._greet(one, message)
    for link, since in list(self._unknown.items()):
      if link.closed or now - since > _PATIENCE:
        link.close()
        del self._unknown[link]

  def _greet(self, link: Link, hello: dict[str, Any]):
    """Takes a process in, or says why not.

    Raises:
      UserError: It was given other flags than this one.
    """
    if not _is_hello(hello):
      self._turn_away(link, f"what has connected to {self._group.address} is no process of a job")
      return
    index, count = hello["index"], self._group.count
    where = f"process {index} (on {hello['host']}, pid {hello['pid']})"
    there = {0: self._mine} | {other: said for other, (_, said) in self._members.items()}
    if not 0 <= index < count:
      line = f"{where} is not of this job: {_difference(hello, self._mine)}."
      self._turn_away(link, f"a process with another index than 0 to {count - 1} came", line)
    elif index in there:
      first = f"on {there[index]['host']}, pid {there[index]['pid']}"
      line = f"{where} comes twice: process {index} of {count} is there already ({first})."
      self._turn_away(link, line, f"{line} Give each process an index of its own (--host_idx).")
    elif differs := _difference(hello, self._mine):
      line = f"{where} was given other flags than process 0: {differs}."
      link.send({"end": line, "status": 2})
      link.close()
      self._end(line, status=2)
      raise UserError(line)
    else:
      self._members[index] = (link, hello)

  def _turn_away(self, link: Link, why: str, line: str = ""):
    """Ends one connection, with a line for the other side if that speaks our language."""
    if line:
      link.send({"end": line, "status": 2})
    link.close()
    if why not in self._said and len(self._said) < _MOST_STRANGERS:
      self._said.add(why)
      _say(f"{why}. It is turned away.")

  def _end(self, line: str, *, status: int):
    for link, _ in self._members.values():
      link.send({"end": line, "status": status})
      link.close()


def _is_hello(message: dict[str, Any]) -> bool:
  """Returns whether a message is what a process of a job begins with."""
  kinds = {"index": int, "count": int, "flags": dict, "host": str, "pid": int}
  if any(type(message.get(name)) is not kind for name, kind in kinds.items()):
    return False
  is_plain = one_line(message["host"], limit=100) == message["host"]
  return is_plain and all(isinstance(text, str) for text in message["flags"].values())


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
  """Returns how two processes differ in what must be the same; "" if they do not."""
  if theirs["count"] != ours["count"]:
    return f"it is one of {theirs['count']} processes, process 0 one of {ours['count']}"
  if not 0 < theirs["index"] < ours["count"]:
    return f"there are {ours['count']} processes"
  return difference(theirs["flags"], ours["flags"])


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
  """Returns the first value in which two mappings differ, in words; "" if they do not."""
  for name in [*ours, *theirs]:
    if theirs.get(name) != ours.get(name):
      both = (theirs, ours)
      said = [f"{name}={one[name]}" if name in one else f"no {name}" for one in both]
      return f"{one_line(said[0], limit=200)} there, {one_line(said[1], limit=200)} here"
  return ""


def _join(group: cluster.Group, mine: dict[str, Any], *, timeout: float, every: float) -> Met:
  """Goes to process 0, which may come later."""
  host, port = _split(group.address)
  began = said = time.monotonic()
  reason = "it does not answer"
  while True:
    try:
      link = Link(socket.create_connection((host, port), timeout=5))
    except OSError as error:
      reason = error.strerror or str(error)
    else:
      met = _talk(link, group, mine)
      if met is not None:
        return met
      link.close()
      reason = "a job that has begun already, or another program, listens there"
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


def _talk(link: Link, group: cluster.Group, mine: dict[str, Any]) -> Met | None:
  """Returns when all are there; None if it is not process 0 that waits for others."""
  link.send(mine)
  heard = time.monotonic()
  while not link.closed and time.monotonic() - heard < 4 * _ALIVE:
    for message in link.receive():
      heard = time.monotonic()
      match message:
        case {"go": [str(leader), int(pid)]}:
          hosts = {0: one_line(leader), group.index: mine["host"]}
          return Met({0: link}, hosts, (leader, pid))
        case {"end": str(line), "status": int(status)}:
          link.close()
          raise (UserError if status == 2 else TemporaryError)(line)
  return None
