# SPDX-License-Identifier: Apache-2.0
"""The lease of a run's folder, so that only one process writes there.

The file `owner_N.json` with the highest N names the owner: host, process, and a heartbeat count
that increases every `BEAT` seconds. A process that takes over from a dead owner N creates N + 1
exclusively (`owner_files`); an owner that was suspended meanwhile then finds N + 1.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from etils import epath

from paxlike import file_io, run_folder
from paxlike.errors import RunError, UserError, one_line
from paxlike.processes import owner_files
from paxlike.processes.owner import Owner, identity, is_alive

BEAT = 5.0
# Seconds without a heartbeat after which an owner counts as dead if `is_alive` returns None.
SILENCE = 30.0
# Seconds by which the clocks of two machines, or of a machine and a store, may differ.
CLOCKS = 300.0


class Observer:
  """Observes whether the owner of a folder is alive, without waiting for a heartbeat."""

  def __init__(self, folder: epath.Path):
    self._folder = folder
    self._seen: tuple[int, bytes | None] | None = None
    self._since = 0.0

  def is_alive(self) -> bool | None:
    """Returns whether the owner seems to be alive; None if there is no owner.

    An owner that only its heartbeat can show to be alive counts as alive until this observer has
    seen no heartbeat for `SILENCE` seconds.

    Raises:
      OSError, and errors of a store: The folder cannot be read.
    """
    number = owner_files.newest(self._folder)
    if not number:
      return None
    owner, data = owner_files.read(self._folder, number)
    if (number, data) != self._seen:
      self._seen, self._since = (number, data), _clock()
    lives = is_alive(owner, self._folder)
    return _clock() - self._since < SILENCE if lives is None else lives


def seems_alive(folder: epath.Path) -> bool | None:
  """Same as `Observer.is_alive`, from a single look: compares the heartbeat's time with the clock.

  Raises:
    OSError, and errors of a store: The folder cannot be read.
  """
  number = owner_files.newest(folder)
  owner, data = owner_files.read(folder, number) if number else (None, None)
  if data is None:
    return None
  lives = is_alive(owner, folder)
  return abs(owner_files.age(folder, number)) < SILENCE + CLOCKS if lives is None else lives


def _lives(folder: epath.Path, number: int) -> Owner | None:
  """Returns owner `number` if it is alive; waits for a heartbeat if there is no other way to know.

  Raises:
    FileNotFoundError: It has removed its file meanwhile, for example because its run was refused.
  """
  owner, before = owner_files.read(folder, number)
  if (lives := is_alive(owner, folder)) is not None:
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
    owner, now = owner_files.read(folder, number)
    if now is None and number not in owner_files.numbers(folder):
      raise FileNotFoundError(owner_files.path_of(folder, number))
    if owner is not None and owner.released:
      return None
    if now != before:
      return owner or Owner("another host", "", 0, "")
  return None


class Lease:
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
    self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")
    self._thread.start()

  def _take(self) -> int:
    while True:
      last = owner_files.newest(self._folder)
      try:
        owner = _lives(self._folder, last) if last else None
      except FileNotFoundError:
        continue
      if owner is not None:
        raise UserError(
          f"--job_log_dir={self._folder} is in use: {owner} writes there. Wait for it to end, or"
          " set another folder."
        )
      if owner_files.create(self._folder, last + 1, self._me):
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
    if not (here := identity(self._folder)):
      return f"{self._folder} was moved or removed while this run was writing in it."
    if here != self._me.folder:
      return (
        f"{self._folder} is a new folder: the one that this run wrote in was moved or removed, and"
        " checkpoints saved since then may be in the new one."
      )
    # Take the lease again, unless another run has it, so that `status.json` can be written.
    self._beaten = float("-inf")  # Forces `check` to look at the owner first.
    with contextlib.suppress(*file_io.failures()):
      owner_files.create(self._folder, self._number, self._me)
    path = owner_files.path_of(self._folder, self._number)
    return (
      f"{path}, which keeps other runs out of the folder, was removed: this run ends, because"
      " another one may have started there."
    )

  def _check(self):
    path = owner_files.path_of(self._folder, self._number)
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
      for number in owner_files.numbers(self._folder):
        if number < self._number - 1:
          owner_files.path_of(self._folder, number).unlink(missing_ok=True)

  def _look(self):
    """Looks for a later owner; writes a heartbeat if there is none."""
    last = owner_files.newest(self._folder)
    if last > self._number:
      self._lost = owner_files.read(self._folder, last)[0] or Owner("another host", "", 0, "")
      return
    # This owner's file may have been removed, and then created by another process.
    owner, _ = owner_files.read(self._folder, self._number)
    if owner is not None and owner[:4] != self._me[:4]:
      self._lost = owner
      return
    self._me = self._me._replace(beat=self._me.beat + 1)
    owner_files.rewrite(self._folder, self._number, self._me)
    self._beaten = _clock()

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
        owner_files.path_of(self._folder, self._number).unlink(missing_ok=True)
      elif owner_files.newest(self._folder) == self._number:
        self._me = self._me._replace(released=True)
        owner_files.rewrite(self._folder, self._number, self._me)


def _clock() -> float:
  """Returns seconds of a clock that includes the time while the machine sleeps."""
  return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class _HeldByFirst:
  """Stands for the lease in processes other than 0: process 0 holds it for the whole job."""

  def check(self):
    """Does nothing."""


@contextlib.contextmanager
def owned(folder: epath.Path) -> Iterator[Lease | _HeldByFirst]:
  """Context in which only this job writes in a folder.

  Raises:
    UserError: Another job owns it; raised in every process.
  """
  import jax

  held: Any = _HeldByFirst()
  refusal: UserError | None = None
  if jax.process_index() == 0:
    with run_folder.writing(folder):
      try:
        held = Lease(folder)
      except UserError as error:
        refusal = error
  if jax.process_count() > 1:
    from paxlike.processes import multiprocess

    multiprocess.raise_everywhere(refusal)
  if refusal is not None:
    raise refusal
  try:
    yield held
  finally:
    if isinstance(held, Lease):
      held.release()
