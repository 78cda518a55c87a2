# SPDX-License-Identifier: Apache-2.0
"""How this process's work ended, for the other processes of its job."""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

from paxlike.errors import exit_status

# The exceptions that ended this process's work in a multi-process job.
_failures: list[BaseException] = []


@contextlib.contextmanager
def reporting_failure(*, leave: bool) -> Iterator[None]:
  """Context of this process's work, whose failure is reported to the other processes of its job.

  With `leave`, success is reported too.
  """
  try:
    yield
  except BaseException as error:
    if others := sys.modules.get("paxlike.processes.multiprocess"):
      _failures.append(error)
      others.fail(error)
    raise
  if leave and (others := sys.modules.get("paxlike.processes.multiprocess")):
    others.leave()


@functools.cache
def leave_at_exit():
  """Makes this process report its exit to the other processes of its job, if there are any."""
  if others := sys.modules.get("paxlike.processes.multiprocess"):
    atexit.register(_leave, others)


def _leave(others: Any):
  if not _failures:
    others.leave()
    return
  # JAX's shutdown would wait for the other processes, which exit by themselves.
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(exit_status(_failures[0]))
