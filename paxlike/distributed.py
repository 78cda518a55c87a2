# SPDX-License-Identifier: Apache-2.0
"""Being one of several processes: joining the others, and noticing when one of them is gone."""

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

from paxlike import __version__, cluster, rendezvous, run_folder, stacks, watch
from paxlike.errors import TemporaryError, UserError

_LONGEST = 600  # Bytes of the reason of a failure.
_LONGEST_GRAPH = 2**19  # Characters; of a longer one processes compare digests.
_NEVER = 10**6  # Seconds after which JAX would end the process; the watch ends it long before.
_HELD_SECONDS = 10

_kept: list[Any] = []  # What C code calls.
_holder: "subprocess.Popen[bytes] | None" = None


def initialize(
  group: cluster.Group | None,
  *,
  timeout: float,
  join_timeout: float = 300,
  flags: Mapping[str, str] | None = None,
):
  """Joins the other processes; from then on this one ends when another is gone.

  Args:
    group: The processes; None: JAX finds out (TPUs).
    timeout: Seconds without a sign after which a process counts as gone.
    join_timeout: Seconds that the others have to come.
    flags: Those that must be the same in all processes, by name.

  Raises:
    UserError: It is not known who the others are, or one was given other flags than process 0.
    TemporaryError: They do not come.
  """
  group = cluster.found_by_jax() if group is None else group
  if not 0 <= group.index < group.count:
    raise UserError(f"process {group.index} of {group.count}: indices count from 0.")
  if group.count > 1:
    versions = {"paxlike": __version__, "JAX": jax.__version__, "Python": platform.python_version()}
    met = rendezvous.meet(group, {**versions, **(flags or {})}, timeout=join_timeout)
    watch.start(met, index=group.index, count=group.count, timeout=timeout)
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
  stacks.obey_sigterm()  # JAX would note it for itself.
  if group.count > 1 and group.index == 0:
    _hold(int(group.address.rpartition(":")[2]), met.links.values())


def _hold(port: int, links: Any):
  """Has a process of its own keep the connections of JAX's service a while after this process.

  JAX's clients abort, without a name and with a stack of C++, as soon as they lose the connection
  to process 0. So the watch of each, whose connection does end with this process, has time to say
  which process is gone.
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
  """Returns whether a file of this process is a connection that has come in at a port."""
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
  """Lets the watch speak first where JAX aborts: most often it has lost process 0."""
  libc = ctypes.CDLL(None)

  def aborted(number: int):
    time.sleep(3)  # The watch ends the process meanwhile, if it is that.
    print("paxlike: JAX aborts; its reason stands above.", file=sys.stderr, flush=True)
    libc.signal(number, 0)  # As if this function had not been there.

  handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(aborted)
  _kept.append(handler)
  libc.signal(signal.SIGABRT, handler)


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


def compare(values: Mapping[str, str] | None = None):
  """Returns when all processes have called this with the same values, if there are others.

  JAX's collectives give up after 30 seconds; this waits until the watch of a process ends the job.

  Raises:
    UserError: Another process has given other values than process 0; in all of them.
  """
  if (own := watch.current()) is not None and not own.is_alone:
    given = dict(values or {})
    if len(text := json.dumps(given)) > _LONGEST_GRAPH:
      given = {"digest": hashlib.sha256(text.encode()).hexdigest()}
    own.compare(given)


def leave():
  """Reports to the other processes, if there are any, that the work of this one is done."""
  if (own := watch.current()) is not None and not own.is_alone:
    own.leave()
  if _holder is not None:
    _holder.kill()
    _holder.wait()


def fail(error: BaseException):
  """Reports to the other processes that this one fails; returns when it may end and print why.

  Where JAX has failed because another process is lost, stuck or has failed, it does not return: the
  watch ends this process by the name of that one.
  """
  if (own := watch.current()) is not None and not own.is_alone:
    own.fail(error)
    own.wait_for_others()
