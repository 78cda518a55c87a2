# SPDX-License-Identifier: Apache-2.0
"""Ownership of a run's folder: a lease, so that only one process writes there.

The file `owner_N.json` with the highest N names the owner: host, process, and a heartbeat count
that increases every `BEAT` seconds. A process that takes over from a dead owner N creates N + 1
exclusively, so only one of several succeeds; an owner that was suspended meanwhile then finds
N + 1. This only needs O_EXCL of a file system (NFS since version 3), or conditional creation of an
object store.
"""

import contextlib
import json
import os
import pathlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import RunError, UserError, one_line

BEAT = 5.0
# Seconds without a heartbeat after which an owner that cannot be looked up counts as dead.
SILENCE = 30.0
_PREFIX = "owner_"
_NAME = re.compile(rf"{_PREFIX}([0-9]+)\.json")
_PROC = pathlib.Path("/proc")
_SIZE = 512  # Constant size of the file in bytes, so that each write replaces all of it.


class Owner(NamedTuple):
  """A process that owns a folder.

  Attributes:
    host: Host name, for messages.
    machine: Where `pid` is valid: host name, boot id and pid namespace.
    pid: Process id.
    started: Start time in the kernel's clock ticks, since pids are reused.
    beat: Heartbeat count.
    released: Whether it has released the folder.
    folder: Device and inode of the folder, so that a copy of the folder is recognized; "": unknown.
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
    return cls(socket.gethostname(), _machine(), pid, started, folder=_identity(folder))

  def __str__(self) -> str:
    return f"process {self.pid} on {self.host}"


_TYPES = (str, str, int, str, int, bool, str)


def _machine() -> str:
  try:
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return socket.gethostname()


def _identity(folder: epath.Path) -> str:
  """Returns an identifier that differs for a copy of a folder on this machine; "" if unknown."""
  if file_io.is_remote(folder):
    return os.fspath(folder)
  try:
    found = os.stat(folder)
  except OSError:
    return ""
  return f"{found.st_dev}:{found.st_ino}"


def _started(pid: int) -> str | None:
  """Returns a process's start time; None if there is no process, "" if unknown."""
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


def is_there(pid: int) -> bool:
  """Returns whether there is a process of this id."""
  return _started(pid) is not None


def _path(folder: epath.Path, number: int) -> epath.Path:
  return folder / f"{_PREFIX}{number:08d}.json"


def _numbers(folder: epath.Path) -> list[int]:
  """Returns the numbers of all owner files, the newest last."""
  if file_io.is_remote(folder):
    import fsspec

    store, root = fsspec.core.url_to_fs(os.fspath(folder))
    store.invalidate_cache()
    names = [name.rpartition("/")[2] for name in store.glob(f"{root}/{_PREFIX}*")]
  else:
    names = os.listdir(folder)
  return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def _read(folder: epath.Path, number: int) -> tuple[Owner | None, bytes | None]:
  """Returns (owner, content of its file).

  The owner is None if the file is missing, unfinished or malformed; the content is None if it is
  missing.
  """
  try:
    data = file_io.read_bytes(_path(folder, number))
  except FileNotFoundError:
    return None, None
  try:
    owner = Owner(**json.loads(data))
  except file_io.MALFORMED:
    return None, data
  known = all(type(value) is kind for value, kind in zip(owner, _TYPES, strict=True))
  return owner if known and owner.pid > 0 else None, data


def _create(folder: epath.Path, number: int, owner: Owner) -> bool:
  """Creates the file of an owner exclusively; returns False if it already exists."""
  path = _path(folder, number)
  if not file_io.is_remote(folder):
    try:
      file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
      return False
    try:
      with os.fdopen(file, "wb") as file:
        file.write(_data(owner))
        file.flush()
        os.fsync(file.fileno())
    except OSError:
      path.unlink(missing_ok=True)  # The next start would wait for its heartbeat.
      raise
    return True
  import fsspec

  store, name = fsspec.core.url_to_fs(os.fspath(path))
  try:
    store.pipe_file(name, _data(owner), mode="create")
  except FileExistsError:
    return False
  except file_io.failures() as error:
    if str(getattr(error, "code", "")) == "412":
      return False
    raise
  return True


def _data(owner: Owner) -> bytes:
  return (json.dumps(owner._asdict()) + "\n").encode().rjust(_SIZE)


def _looked_up(owner: Owner | None, folder: epath.Path) -> bool | None:
  """Returns whether an owner is alive; None if only its heartbeat can show that.

  That is so for an owner on another host, one whose start time is hidden, and for a copied folder.
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
  here = _identity(folder)
  if not started or not owner.started or (owner.folder and here and owner.folder != here):
    return None
  return started == owner.started


class Observer:
  """Observes whether the owner of a folder is alive, without waiting for a heartbeat."""

  def __init__(self, folder: epath.Path):
    self._folder = folder
    self._seen: tuple[int, bytes | None] | None = None
    self._since = 0.0

  def lives(self) -> bool | None:
    """Returns whether the owner is alive, as far as known yet; None if there is no owner.

    Raises:
      OSError, and errors of a store: The folder cannot be read.
    """
    number = max(_numbers(self._folder), default=0)
    if not number:
      return None
    owner, data = _read(self._folder, number)
    if (number, data) != self._seen:
      self._seen, self._since = (number, data), _clock()
    lives = _looked_up(owner, self._folder)
    return _clock() - self._since < SILENCE if lives is None else lives


def _lives(folder: epath.Path, number: int) -> Owner | None:
  """Returns owner `number` if it is alive; waits for a heartbeat if there is no other way to know.

  Raises:
    FileNotFoundError: It has removed its file meanwhile, for example because its run was refused.
  """
  owner, before = _read(folder, number)
  if (lives := _looked_up(owner, folder)) is not None:
    return owner if lives else None
  name = one_line(owner or "a process", limit=200)
  print(
    f"paxlike: {folder} was written by {name}: waiting up to {SILENCE:.0f} s for its heartbeat",
    file=sys.stderr,
    flush=True,
  )
  until = time.monotonic() + SILENCE
  while time.monotonic() < until:
    time.sleep(min(1.0, SILENCE / 4))
    owner, now = _read(folder, number)
    if now is None and number not in _numbers(folder):
      raise FileNotFoundError(_path(folder, number))
    if owner is not None and owner.released:
      return None
    if now != before:
      return owner or Owner("another host", "", 0, "")
  return None


class Ownership:
  """This process's lease of a folder, renewed by a heartbeat thread."""

  def __init__(self, folder: epath.Path):
    """Takes the lease.

    Raises:
      UserError: Another process has it.
    """
    self._folder = folder
    self._me = Owner.here(folder)
    self._used = False
    self._lost: Owner | None = None
    self._ends = threading.Event()
    self._number = self._take()
    self._beaten = _clock()
    self._thread = threading.Thread(target=self._beat, daemon=True, name="ownership")
    self._thread.start()

  def _take(self) -> int:
    while True:
      last = max(_numbers(self._folder), default=0)
      try:
        owner = _lives(self._folder, last) if last else None
      except FileNotFoundError:
        continue
      if owner is not None:
        raise UserError(
          f"--job_log_dir={self._folder} is in use: {owner} writes there. Wait for it to end, or"
          " set another folder."
        )
      if _create(self._folder, last + 1, self._me):
        return last + 1

  def check(self):
    """Checks that this process still owns the folder; must be called before every write there.

    Raises:
      RunError: Another process has taken over, or the folder or the owner file is missing: only
        the run's final status may still be written, if this process still owns the folder.
      UserError: The folder cannot be reached.
    """
    try:
      with run_folder.writing(self._folder):
        self._check()
    except UserError as error:
      if not isinstance(error.__cause__, FileNotFoundError):
        raise
      raise RunError(self._gone()) from error

  def _gone(self) -> str:
    """Returns the error message if this owner's file is missing; creates the file again."""
    if not (here := _identity(self._folder)):
      return f"{self._folder} was moved or removed while this run was writing in it."
    if here != self._me.folder:
      return (
        f"{self._folder} is a new folder: the one that this run wrote in was moved or removed, and"
        " checkpoints saved since then may be in the new one."
      )
    # Take the lease again, unless another run has it, so that `status.json` can be written.
    self._beaten = float("-inf")  # Forces `check` to look at the owner first.
    with contextlib.suppress(*file_io.failures()):
      _create(self._folder, self._number, self._me)
    return (
      f"{_path(self._folder, self._number)}, which keeps other runs out of the folder, was removed:"
      " this run ends, because another one may have started there."
    )

  def _check(self):
    path = _path(self._folder, self._number)
    is_missing = not file_io.is_remote(path) and not path.exists()
    # After so long without a heartbeat, this process must have been suspended.
    if self._lost is None and (is_missing or _clock() - self._beaten > SILENCE / 2):
      self._look()
    if self._lost is not None:
      raise RunError(
        f"{self._folder} was taken over by {self._lost}, which saw no heartbeat of this process:"
        " it ends, and writes nothing more."
      )
    if not self._used:
      self._used = True
      # Keep the previous owner's file: a process that listed the folder just before this owner's
      # file was created must still find an owner.
      for number in _numbers(self._folder):
        if number < self._number - 1:
          _path(self._folder, number).unlink(missing_ok=True)

  def _look(self):
    """Looks for a later owner; writes a heartbeat if there is none."""
    last = max(_numbers(self._folder), default=0)
    if last > self._number:
      self._lost = _read(self._folder, last)[0] or Owner("another host", "", 0, "")
      return
    # This owner's file may have been removed, and then created by another process.
    owner, _ = _read(self._folder, self._number)
    if owner is not None and owner[:4] != self._me[:4]:
      self._lost = owner
      return
    self._me = self._me._replace(beat=self._me.beat + 1)
    self._write()
    self._beaten = _clock()

  def _write(self):
    path = _path(self._folder, self._number)
    if file_io.is_remote(path):
      path.write_bytes(_data(self._me))
      return
    file = os.open(path, os.O_WRONLY)
    try:
      os.pwrite(file, _data(self._me), 0)
      os.fsync(file)
    finally:
      os.close(file)

  def _beat(self):
    while not self._ends.wait(min(BEAT, SILENCE / 4)) and self._lost is None:
      # Retried at the next beat; until then `check` looks itself.
      with contextlib.suppress(*file_io.failures()):
        self._look()

  def release(self):
    """Releases the lease, so that the next process can take it at once.

    Removes the owner file if nothing was written in the folder.
    """
    self._ends.set()
    self._thread.join()
    if self._lost is not None:
      return
    with contextlib.suppress(*file_io.failures()):  # Otherwise the lease expires.
      if not self._used:
        _path(self._folder, self._number).unlink(missing_ok=True)
      elif max(_numbers(self._folder), default=0) == self._number:
        self._me = self._me._replace(released=True)
        self._write()


def _clock() -> float:
  """Returns seconds of a clock that includes the time while the machine sleeps."""
  return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _OwnedByFirst:
  """The ownership of processes other than 0, which owns the folder for all."""

  def check(self):
    """Does nothing."""


@contextlib.contextmanager
def owned(folder: epath.Path) -> Iterator[Ownership | _OwnedByFirst]:
  """Context in which only this job writes in a folder.

  Raises:
    UserError: Another job owns it; raised in every process.
  """
  import jax

  ownership: Any = _OwnedByFirst()
  refusal: UserError | None = None
  if jax.process_index() == 0:
    with run_folder.writing(folder):
      try:
        ownership = Ownership(folder)
      except UserError as error:
        refusal = error
  if jax.process_count() > 1:
    from paxlike.processes import multiprocess

    multiprocess.agree(refusal)
  if refusal is not None:
    raise refusal
  try:
    yield ownership
  finally:
    if isinstance(ownership, Ownership):
      ownership.release()
