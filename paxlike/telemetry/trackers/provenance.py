# SPDX-License-Identifier: Apache-2.0
"""Where a run comes from: its identity, the commit of the user's code, the environment."""

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import uuid

import jax
from etils import epath

from paxlike import __version__, file_io
from paxlike.errors import UserError
from paxlike.telemetry.run_header import RunHeader

FILE = "trackers.json"  #: In the run's folder.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "libtpu")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_GIT_SECONDS = 5.0  # Time-out; the status of a large repository on a network disk takes long.


def run_id(folder: epath.Path) -> str:
  """Returns the id of the run in a folder for all trackers, created at its first start.

  Raises:
    UserError: The file with the id is damaged.
    OSError: It cannot be read or written.
  """
  path = folder / FILE
  if not path.exists():
    made = uuid.uuid4().hex[:12]
    file_io.write(path, json.dumps({"id": made}) + "\n")
    return made
  try:
    found = json.loads(file_io.read_bytes(path))["id"]
    if not (isinstance(found, str) and found.isalnum()):
      raise ValueError("its id is not letters and digits")
  except file_io.MALFORMED as error:
    raise UserError(
      f"{path} is damaged ({file_io.reason(error)}): delete it, and trackers begin a new run."
    ) from error
  return found


def facts(header: RunHeader) -> dict[str, str | int | float]:
  """Returns the model's size, the batch, devices, versions, host, command and git commit."""
  devices = header.devices
  found: dict[str, str | int | float] = {
    "num_params": header.num_params,
    "num_trained": header.num_trained,
    "batch_size": header.batch_size,
    "seq_len": header.seq_len,
    "flops_per_token": header.flops.causal,
    "attention": header.attention,
    "mesh": ", ".join(f"{axis} {size}" for axis, size in devices.shape.items()),
    "num_devices": devices.size,
    "device": devices.devices.flat[0].device_kind,
    "num_processes": jax.process_count(),
    "host": socket.gethostname(),
    "platform": platform.platform(),
    "command": shlex.join(sys.argv),
    "python": platform.python_version(),
    "paxlike": __version__,
  }
  for name in _LIBRARIES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      continue
  found |= {name: os.environ[name] for name in _VARIABLES if name in os.environ}
  return found | _git()


def _git() -> dict[str, str | int]:
  """Returns the commit of the working directory, and whether files differ from it.

  Empty outside of a repository.
  """
  commit = _output_of_git("rev-parse", "HEAD")
  if not commit:
    return {}
  found: dict[str, str | int] = {"git_commit": commit}
  if branch := _output_of_git("rev-parse", "--abbrev-ref", "HEAD"):
    found["git_branch"] = branch
  changed = _output_of_git("status", "--porcelain", "--untracked-files=no")
  if changed is not None:
    found["git_changed_files"] = len(changed.splitlines())
  return found


def _output_of_git(*arguments: str) -> str | None:
  """Returns what git prints; None if it fails or there is no git."""
  command = ["git", "--no-optional-locks", *arguments]
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
  except (OSError, subprocess.TimeoutExpired):
    return None
  return done.stdout.strip() if done.returncode == 0 else None
