# SPDX-License-Identifier: Apache-2.0
"""Joining a job of several processes, and agreement between them."""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from paxlike import __version__, file_io
from paxlike.errors import TemporaryError, UserError
from paxlike.processes import cluster, job_watch, rendezvous, stack_traces

_LONGEST = 600  # Bytes of a failure's reason.
_LONGEST_GRAPH = 2**19  # Characters; for longer graphs, digests are compared.
_NEVER = 10**6  # JAX's heartbeat time-out in seconds; the watch acts long before.
_HELD_SECONDS = 10

_kept: list[Any] = []  # Keeps callbacks of C code alive.
_holder: "subprocess.Popen[bytes] | None" = None


def initialize(
  group: cluster.ProcessGroup | None,
  *,
  timeout: float,
  join_timeout: float = 300,
  flags: Mapping[str, str] | None = None,
):
  """Joins the other processes; from then on this one ends when another is lost.

  Args:
    group: The processes; None: detected by JAX (TPUs).
    timeout: Seconds without a heartbeat after which a process counts as lost.
    join_timeout: Seconds that all processes have to join.
    flags: Flags that must be equal in all processes, by name.

  Raises:
    UserError: The processes cannot be detected, or one has other flags than process 0.
    TemporaryError: Some do not join in time.
  """
  group = cluster.found_by_jax() if group is None else group
  if not 0 <= group.index < group.count:
    raise UserError(
      f"process {group.index} of {group.count}: indices are 0 to {group.count - 1} (--host_idx)."
    )
  if group.count > 1:
    versions = {"paxlike": __version__, "JAX": jax.__version__, "Python": platform.python_version()}
    connections = rendezvous.meet(group, {**versions, **(flags or {})}, timeout=join_timeout)
    job_watch.start(connections, index=group.index, count=group.count, timeout=timeout)
    _watch_aborts()
  try:
    jax.distributed.initialize(
      group.address,
      group.count,
      group.index,
      local_device_ids=group.devices,
      cluster_detection_method="deactivate",
      initialization_timeout=math.ceil(max(60.0, timeout)),
      heartbeat_timeout_seconds=_NEVER,
      shutdown_timeout_seconds=math.ceil(timeout),
    )
  except (ValueError, RuntimeError, OSError) as error:
    where = f"this is {group.index} of {group.count}, {group.address}"
    raise TemporaryError(f"could not join the other processes ({where}): {error}") from error
  stack_traces.obey_sigterm()  # Replaces the handler that JAX has installed.
  if group.count > 1 and group.index == 0:
    _hold(int(group.address.rpartition(":")[2]), connections.links.values())


def _hold(port: int, links: Any):
  """Starts a process that keeps the connections of JAX's coordinator open after this process ends.

  JAX's clients abort with a C++ stack as soon as they lose the connection to process 0. With this,
  each watch, whose connection does close with process 0, has time to report which process is lost.
  """
  global _holder
  ours = {link.fileno() for link in links}
  held = []
  for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
    number = int(name)
    if number not in ours and _is_accepted(number, port):
      held.append(number)
  _holder = subprocess.Popen(
    ["sh", "-c", f"cat; sleep {_HELD_SECONDS}"],
    stdin=subprocess.PIPE,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    pass_fds=held,
    start_new_session=True,
  )


def _is_accepted(number: int, port: int) -> bool:
  """Returns whether a file descriptor is a connection accepted at `port`."""
  try:
    copy = os.dup(number)
    try:
      one = socket.socket(fileno=copy)
    except OSError:
      os.close(copy)
      return False
    with one:
      one.getpeername()
      return one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port
  except OSError:
    return False


def _watch_aborts():
  """Delays an abort of JAX: the watch can first report its cause, usually a lost process 0."""
  libc = ctypes.CDLL(None)

  def aborted(number: int):
    time.sleep(3)  # If a process is lost, the watch ends this one meanwhile.
    print("paxlike: JAX aborts; its reason is printed above.", file=sys.stderr, flush=True)
    libc.signal(number, 0)  # SIG_DFL: abort proceeds.

  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
  _kept.append(handler)
  libc.signal(signal.SIGABRT, handler)


def check_shared(folder: epath.Path):
  """Checks that all processes share a folder, since each writes its shards of a checkpoint there.

  Otherwise the first save would hang.

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
      with contextlib.suppress(*file_io.failures()):
        token.unlink(missing_ok=True)
  if blind:
    raise UserError(
      f"--job_log_dir={folder} is not the same folder in all processes: process"
      f" {', '.join(map(str, blind))} does not see what process 0 writes there"
      f" ({'; '.join(set(blind.values()))}). Set one on a shared file system or a bucket."
    )


def raise_everywhere(refusal: UserError | None):
  """Broadcasts process 0's `refusal` and raises it in all processes, if there is one.

  Raises:
    UserError: Process 0 has refused the job.
  """
  said = np.frombuffer(str(refusal or "").encode()[:_LONGEST].ljust(_LONGEST), np.uint8)
  first = bytes(multihost_utils.broadcast_one_to_all(said)).decode(errors="ignore").strip()
  if first:
    raise UserError(first)


def _failures(action: Callable[[], object]) -> dict[int, str]:
  """Runs an action in all processes; returns process -> reason of failure, equal in all."""
  reason = ""
  try:
    action()
  except file_io.failures() as error:
    reason = file_io.reason(error)
  said = np.frombuffer(reason.encode()[:_LONGEST].ljust(_LONGEST), np.uint8)
  everyone = multihost_utils.process_allgather(said)
  reasons = [bytes(one).decode(errors="ignore").strip() for one in everyone]
  return {index: text for index, text in enumerate(reasons) if text}


def compare(values: Mapping[str, str] | None = None):
  """A barrier that also compares `values` between processes; does nothing in a single one.

  JAX's collectives time out after 30 seconds; this waits until a watch ends the job.

  Raises:
    UserError: A process has other values than process 0; raised in all processes.
  """
  if (own := job_watch.current()) is not None and not own.is_alone:
    given = dict(values or {})
    if len(text := json.dumps(given)) > _LONGEST_GRAPH:
      given = {"digest": hashlib.sha256(text.encode()).hexdigest()}
    own.compare(given)


def leave():
  """Reports to the other processes, if any, that this one's work is done."""
  if (own := job_watch.current()) is not None and not own.is_alone:
    own.leave()
  if _holder is not None:
    _holder.kill()
    _holder.wait()


def fail(error: BaseException):
  """Reports this process's failure to the others; returns when this one may end and print why.

  If another process caused it (lost, stuck or failed), this does not return: the watch ends this
  process and names that one.
  """
  if (own := job_watch.current()) is not None and not own.is_alone:
    own.fail(error)
    own.wait_for_others()
