# SPDX-License-Identifier: Apache-2.0
"""The owner of a run's folder: a process, how it is recognized, and whether it is alive."""

import os
import pathlib
import socket
import time
from typing import NamedTuple

from etils import epath

from paxlike import file_io

_PROC = pathlib.Path("/proc")


class Owner(NamedTuple):
  """A process that owns a folder.

  Attributes:
    host: Host name, for messages.
    machine: Where `pid` is unique: host name, boot id and pid namespace.
    pid: Process id.
    started: Start time in the kernel's clock ticks, since pids are reused.
    beat: Heartbeat count.
    released: Whether it has released the folder.
    folder: Device and inode of the folder, or its URL on an object store, so that a copy of it is
      recognized; "": unknown.
  """

  host: str
  machine: str
  pid: int
  started: str
  beat: int = 0
  released: bool = False
  folder: str = ""

  @classmethod
  def here(cls, folder: epath.Path) -> "Owner":
    """Returns this process as an owner."""
    pid = os.getpid()
    started = _started(pid) or ""
    return cls(socket.gethostname(), _machine(), pid, started, folder=identity(folder))

  def __str__(self) -> str:
    return f"process {self.pid} on {self.host}"


def is_alive(owner: Owner | None, folder: epath.Path) -> bool | None:
  """Returns whether an owner is alive; None if only its heartbeat can show that.

  That is so if the owner is unreadable (None), on another host, of an earlier boot or in another
  container, if its start time is hidden, and if the folder is a copy of the owner's.
  """
  if owner is None:
    return None
  if owner.released:
    return False
  if owner.machine != _machine():
    return None
  started = _started(owner.pid)
  if started is None:
    return False
  here = identity(folder)
  if not started or not owner.started or (owner.folder and here and owner.folder != here):
    return None
  return started == owner.started


def _machine() -> str:
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return socket.gethostname()


def identity(folder: epath.Path) -> str:
  """Returns an identifier that differs for a copy of a folder on this machine; "" if unknown."""
  if file_io.is_remote(folder):
    return os.fspath(folder)
  try:
    found = os.stat(folder)
  except OSError:
    return ""
  return f"{found.st_dev}:{found.st_ino}"


def _started(pid: int) -> str | None:
  """Returns a process's start time; None if there is none, or a zombie; "" if unknown."""
  try:
    state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
  except OSError:
    pass
  # /proc mounted with hidepid hides other users' processes.
  try:
    os.kill(pid, 0)
  except (ProcessLookupError, OverflowError):
    return None
  except PermissionError:
    pass
  return ""


def age() -> float:
  """Returns the seconds since this process started; 0 if unknown."""
  started = _started(os.getpid())
  if not started:
    return 0.0
  return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


def is_there(pid: int) -> bool:
  """Returns whether there is a process of this id."""
  return _started(pid) is not None
