# SPDX-License-Identifier: Apache-2.0
"""The one process that writes in the folder of a run, and how others know that it lives.

`owner_N.json` says who owns the folder, N being the highest there is: the host, the process, and a
count that goes up every `BEAT` seconds. Who takes over from a dead owner N makes N + 1. Of several
that try, one succeeds, since a file is made only where there is none; and an owner that was
suspended meanwhile finds N + 1. That needs nothing of a file system but O_EXCL, which NFS has since
version 3, and of an object store that it makes an object only where there is none.
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

from paxlike import run_folder
from paxlike.errors import RunError, UserError, one_line

BEAT = 5.0
# Seconds after which an owner that cannot be looked up, and gives no sign, counts as dead.
SILENCE = 30.0
_PREFIX = "owner_"
_NAME = re.compile(rf"{_PREFIX}([0-9]+)\.json")
_PROC = pathlib.Path("/proc")
_SIZE = 512  # Bytes of the file: always as many, so that each write replaces all of it.


class Owner(NamedTuple):
  """A process that owns a folder.

  Attributes:
    host: Its name, for people.
    machine: Says where `pid` means a process: the boot of a machine, and its namespace.
    pid: The process.
    started: When, in the kernel's count: another process may get the same pid.
    beat: Goes up while it lives.
    released: Whether it has left in good order.
    folder: The folder as that machine knows it, whatever its path; "": not known. A copy of the
      folder, with this file in it, is another one.
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
    """Returns this process."""
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
  """Returns what tells a folder from a copy of it on this machine, "" if that is not known."""
  if run_folder.is_remote(folder):
    return os.fspath(folder)
  try:
    found = os.stat(folder)
  except OSError:
    return ""
  return f"{found.st_dev}:{found.st_ino}"


def _started(pid: int) -> str | None:
  """Returns when a process started, None if there is none, "" if that is not known."""
  try:
    state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]
  except OSError:
    pass
  # Where /proc is mounted with hidepid, it has no process of another user.
  try:
    os.kill(pid, 0)
  except (ProcessLookupError, OverflowError):
    return None
  except PermissionError:
    pass
  return ""


def is_there(pid: int) -> bool:
  """Returns whether there is a process of this number."""
  return _started(pid) is not None


def _path(folder: epath.Path, number: int) -> epath.Path:
  return folder / f"{_PREFIX}{number:08d}.json"


def _numbers(folder: epath.Path) -> list[int]:
  """Returns the numbers of all owners that there are files of, the newest last."""
  if run_folder.is_remote(folder):
    import fsspec

    store, root = fsspec.core.url_to_fs(os.fspath(folder))
    store.invalidate_cache()
    names = [name.rpartition("/")[2] for name in store.glob(f"{root}/{_PREFIX}*")]
  else:
    names = os.listdir(folder)
  return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def _read(folder: epath.Path, number: int) -> tuple[Owner | None, bytes]:
  """Returns an owner, None if its file does not say (yet), and what the file holds."""
  try:
    data = run_folder.read_bytes(_path(folder, number))
  except FileNotFoundError:
    return None, b""
  try:
    owner = Owner(**json.loads(data))
  except run_folder.MALFORMED:
    return None, data
  known = all(type(value) is kind for value, kind in zip(owner, _TYPES, strict=True))
  return owner if known and owner.pid > 0 else None, data


def _create(folder: epath.Path, number: int, owner: Owner) -> bool:
  """Makes the file of an owner; returns whether it was not there."""
  path = _path(folder, number)
  if not run_folder.is_remote(folder):
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
      path.unlink(missing_ok=True)  # The next start would wait for a sign of it.
      raise
    return True
  import fsspec

  store, name = fsspec.core.url_to_fs(os.fspath(path))
  try:
    store.pipe_file(name, _data(owner), mode="create")
  except FileExistsError:
    return False
  except run_folder.failures() as error:
    if str(getattr(error, "code", "")) == "412":
      return False
    raise
  return True


def _data(owner: Owner) -> bytes:
  return (json.dumps(owner._asdict()) + "\n").encode().rjust(_SIZE)


def _looked_up(owner: Owner | None, folder: epath.Path) -> bool | None:
  """Returns whether an owner lives, None if only signs of it can tell.

  Such is one on another host, one whose start this process may not see, and one of a folder that
  this one is a copy of.
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
  """Finds for others whether the owner of a folder lives, and never waits for a sign of it."""

  def __init__(self, folder: epath.Path):
    self._folder = folder
    self._seen: tuple[int, bytes] | None = None
    self._since = 0.0

  def lives(self) -> bool | None:
    """Returns whether it lives, as far as is known by now; None if there is no owner.

    Raises:
      OSError, and what else a store raises: The folder cannot be read.
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
  """Returns the owner of a number if it lives; where only signs can tell it waits for one."""
  owner, before = _read(folder, number)
  if (lives := _looked_up(owner, folder)) is not None:
    return owner if lives else None
  name = one_line(owner or "a process", limit=200)
  print(
    f"paxlike: {folder} was written by {name}: waiting up to {SILENCE:.0f} s for a sign of it",
    file=sys.stderr,
    flush=True,
  )
  until = time.monotonic() + SILENCE
  while time.monotonic() < until:
    time.sleep(min(1.0, SILENCE / 4))
    owner, now = _read(folder, number)
    if owner is not None and owner.released:
      return None
    if now != before:
      return owner or Owner("another host", "", 0, "")
  return None


class Ownership:
  """The right of this process to write in a folder, which it holds and shows by a thread."""

  def __init__(self, folder: epath.Path):
    """Takes it.

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
      if last and (owner := _lives(self._folder, last)):
        raise UserError(
          f"--job_log_dir={self._folder} is in use: {owner} writes there. Wait for it to end, or"
          " name another folder."
        )
      if _create(self._folder, last + 1, self._me):
        return last + 1

  def check(self):
    """Called before anything is written in the folder.

    Raises:
      RunError: Another process has taken over, or the folder is gone: nothing more may be written.
      UserError: The folder cannot be reached.
    """
    try:
      with run_folder.writing(self._folder):
        self._check()
    except UserError as error:
      if not isinstance(error.__cause__, FileNotFoundError):
        raise
      raise RunError(
        f"{self._folder} is gone: it was moved or removed while this run wrote in it."
      ) from error

  def _check(self):
    if self._lost is None and _clock() - self._beaten > SILENCE / 2:
      self._look()  # This process was suspended, and its thread too.
    if self._lost is not None:
      raise RunError(
        f"{self._folder} was taken over by {self._lost}, which did not find this process alive: it"
        " ends, and writes nothing more."
      )
    if not self._used:
      self._used = True
      # A listing of the folder that began before this owner's file was made may lack that, and
      # must have an owner: so the file before it stays.
      for number in _numbers(self._folder):
        if number < self._number - 1:
          _path(self._folder, number).unlink(missing_ok=True)

  def _look(self):
    """Looks for a later owner, and gives a sign if there is none."""
    later = max(_numbers(self._folder), default=0)
    if later > self._number:
      self._lost = _read(self._folder, later)[0] or Owner("another host", "", 0, "")
      return
    self._me = self._me._replace(beat=self._me.beat + 1)
    self._write()
    self._beaten = _clock()

  def _write(self):
    path = _path(self._folder, self._number)
    if run_folder.is_remote(path):
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
      # What cannot be reached now may be later; until then `check` asks.
      with contextlib.suppress(*run_folder.failures()):
        self._look()

  def release(self):
    """Gives it up, for the next to take at once. Where nothing was written no file stays."""
    self._ends.set()
    self._thread.join()
    if self._lost is not None:
      return
    with contextlib.suppress(*run_folder.failures()):  # It will be seen to be dead.
      if not self._used:
        _path(self._folder, self._number).unlink(missing_ok=True)
      elif max(_numbers(self._folder), default=0) == self._number:
        self._me = self._me._replace(released=True)
        self._write()


def _clock() -> float:
  """Returns seconds that count while the machine sleeps, too."""
  return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _Trusting:
  """What the other processes of a job have: process 0 owns the folder for all."""

  def check(self):
    """Does nothing."""


@contextlib.contextmanager
def owned(folder: epath.Path) -> Iterator[Ownership | _Trusting]:
  """Context in which this job alone writes in a folder.

  Raises:
    UserError: Another does; in every process.
  """
  import jax

  ownership: Any = _Trusting()
  refusal: UserError | None = None
  if jax.process_index() == 0:
    with run_folder.writing(folder):
      try:
        ownership = Ownership(folder)
      except UserError as error:
        refusal = error
  if jax.process_count() > 1:
    from paxlike import distributed

    distributed.agree(refusal)
  if refusal is not None:
    raise refusal
  try:
    yield ownership
  finally:
    if isinstance(ownership, Ownership):
      ownership.release()
