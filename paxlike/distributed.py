# SPDX-License-Identifier: Apache-2.0
"""Being one of several processes: joining the others, and noticing when one of them is gone."""

import contextlib
import ctypes
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from etils import epath
from jax._src import distributed as jax_distributed  # Its key-value store has no public name.
from jax.experimental import multihost_utils

from paxlike import cluster, run_folder
from paxlike.errors import UserError

_FOLDER, _VERDICT = "paxlike/process", "paxlike/gone"
_LEFT, _FAILED = "left", "failed"
_LONGEST = 600  # Bytes of the reason of a failure.

_watch: "Watch | None" = None


def initialize(group: cluster.Group | None, *, timeout: float):
  """Joins the other processes; from then on this one ends when another is gone.

  Args:
    group: The processes; None: JAX finds out (TPUs).
    timeout: Seconds without a sign after which a process counts as gone.

  Raises:
    UserError: It is not known who the others are, or they do not come.
  """
  later = 2 * math.ceil(timeout) + 40  # JAX names no process, and may see half of it as over.
  try:
    if group is None:
      with cluster.gke_answers():
        jax.distributed.initialize(heartbeat_timeout_seconds=later)
    else:
      jax.distributed.initialize(
        group.address,
        group.count,
        group.index,
        local_device_ids=group.devices,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=later,
      )
  except (ValueError, RuntimeError, OSError) as error:
    where = "" if group is None else f" (this is {group.index} of {group.count}, {group.address})"
    raise UserError(
      f"could not join the other processes{where}: {error} Where no cluster tells, give"
      " --server_addr=HOST:PORT --num_hosts=N --host_idx=I."
    ) from error
  # Which asks for no device: the share of their memory is not said yet.
  if (jax_distributed.global_state.num_processes or 1) > 1:
    global _watch
    _watch = Watch(timeout=timeout)
    _watch.start()


def check_shared(folder: epath.Path):
  """Finds whether all processes see one folder: each writes its part of a checkpoint there.

  Where they do not, the first save would wait forever.

  Raises:
    UserError: Process 0 cannot write there, or a process does not see what it writes.
  """
  if jax.process_count() == 1:
    return
  number = np.random.default_rng().integers(2**31)
  token = folder / f".seen-by-all-{multihost_utils.broadcast_one_to_all(number)}"
  is_first = jax.process_index() == 0

  try:
    if failed := _failures(lambda: is_first and token.write_text("")):
      raise UserError(f"--job_log_dir={folder} cannot be written: {failed[0]}.")
    blind = _failures(token.read_text)
  finally:
    if is_first:
      with contextlib.suppress(*run_folder.failures()):
        token.unlink(missing_ok=True)
  if blind:
    raise UserError(
      f"--job_log_dir={folder} is not the same folder everywhere: process"
      f" {', '.join(map(str, blind))} does not see what process 0 writes there"
      f" ({'; '.join(set(blind.values()))}). Give one that all see, on a shared file system or a"
      " bucket."
    )


def agree(refusal: UserError | None):
  """Raises in all processes what process 0 refuses the job with, if it does.

  Raises:
    UserError: It does.
  """
  said = np.frombuffer(str(refusal or "").encode()[:_LONGEST].ljust(_LONGEST), np.uint8)
  first = bytes(multihost_utils.broadcast_one_to_all(said)).decode(errors="ignore").strip()
  if first:
    raise UserError(first)


def _failures(action: Callable[[], object]) -> dict[int, str]:
  """Does something in all processes. Returns why it failed, by process: the same in all of them."""
  reason = ""
  try:
    action()
  except run_folder.failures() as error:
    reason = run_folder.reason(error)
  said = np.frombuffer(reason.encode()[:_LONGEST].ljust(_LONGEST), np.uint8)
  everyone = multihost_utils.process_allgather(said)
  reasons = [bytes(one).decode(errors="ignore").strip() for one in everyone]
  return {index: text for index, text in enumerate(reasons) if text}


def leave(*, failed: bool):
  """Tells the other processes, if there are any, that the work of this one has ended."""
  if _watch is not None:
    _watch.leave(_FAILED if failed else _LEFT)


def wait_for_watch():
  """Lets the process end by the name of the one that is gone, if that is why something failed."""
  if _watch is not None:
    _watch.join(2 * _watch.timeout)


class Watch(threading.Thread):
  """Gives a sign of this process, and ends it when another gives none: the main thread may hang.

  Process 0, where all signs meet, looks after the others, and they ask it. JAX aborts the others as
  soon as its process 0 is gone, and does not say so: that is said on the way.
  """

  def __init__(self, *, timeout: float):
    super().__init__(daemon=True, name="watch")
    self.timeout = timeout
    self._interval = min(5.0, timeout / 4)
    state: Any = jax_distributed.global_state
    self._client, self._address = state.client, state.coordinator_address
    self._index, self._count = state.process_id, state.num_processes
    self._host = socket.gethostname()
    self._seen: dict[int, tuple[str, float]] = {}
    self._ends = threading.Event()
    self._say("0")
    # Kept, so that it is there when it is called.
    self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: self._aborted())
    ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)

  def leave(self, state: str):
    """Gives the last sign."""
    self._ends.set()
    try:
      self._say(state)
      if state == _FAILED and self._index == 0:
        self._tell(f"process 0 of {self._count} (on {self._host}) has failed")
    except RuntimeError:
      pass  # Process 0 has left already.

  def run(self):
    """Goes on until this process leaves or another is gone."""
    number = 0
    while not self._ends.wait(self._interval):
      number += 1
      try:
        self._say(str(number))
        gone = self._look() if self._index == 0 else self._ask()
      except RuntimeError:
        continue  # Process 0 does not answer: if it stays so, JAX aborts.
      if gone is not None and not self._ends.is_set():
        if self._index == 0:
          self._tell(gone)
        self._end(gone)

  def _say(self, state: str):
    key, value = f"{_FOLDER}/{self._index}", f"{state} {self._host}"
    self._client.key_value_set(key, value, allow_overwrite=True)

  def _tell(self, gone: str):
    """Says to the others which process is gone, and stays until they have asked."""
    self._client.key_value_set(_VERDICT, gone, allow_overwrite=True)
    time.sleep(2 * self._interval)

  def _ask(self) -> str | None:
    """Returns what process 0 has found."""
    try:
      return self._client.key_value_try_get(_VERDICT)
    except RuntimeError as error:
      if "NOT_FOUND" in str(error):
        return None
      raise

  def _look(self) -> str | None:
    """Returns which process is gone, if one is."""
    now = time.monotonic()
    for key, value in self._client.key_value_dir_get(_FOLDER):
      index, (state, host) = int(key.rsplit("/")[-1]), value.split(" ", 1)
      name = f"process {index} of {self._count} (on {host})"
      last, since = self._seen.get(index, ("", now))
      if state == _FAILED:
        return f"{name} has failed"
      if state != last:
        self._seen[index] = (state, now)
      elif state != _LEFT and now - since > self.timeout:
        return f"{name} has given no sign for {now - since:.0f} s"
    return None

  def _aborted(self):
    if self._ends.is_set():
      return
    host, _, port = self._address.rpartition(":")
    try:
      socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError:
      self._end(f"process 0 of {self._count} (at {host}:{port}) is gone")

  def _end(self, gone: str) -> NoReturn:
    print(
      f"paxlike: {gone}, so process {self._index} (on {self._host}) ends too. Started again, the"
      " job goes on from its newest checkpoint.",
      file=sys.stderr,
      flush=True,
    )
    os._exit(1)
