# SPDX-License-Identifier: Apache-2.0
"""Programs that start without importing: a process that has imported paxlike forks for each.

    with warm_python.served(folder) as program:
      subprocess.run([program, "-m", "paxlike.main", ...])

`program` is a file that takes `-m MODULE` or a script as python does. What it runs has the working
directory, environment, streams and exit status of `program`, but not its process group or limits.
Of signals, only the end of `program` reaches it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from helpers.sources import REPOSITORY

# What most programs import, and takes longest.
_IMPORTED = (
  *("flax.nnx", "optax", "orbax.checkpoint", "paxlike.run_mode", "paxlike.cli.epochs"),
  *("paxlike.experiments.datasets", "paxlike.training.trainer", "paxlike.compilation.aot"),
)
_CLIENT = pathlib.Path(__file__).with_name("warm_client.py")


@functools.cache
def program() -> pathlib.Path:
  """Returns the program of this session, which is served until this process ends."""
  stack = contextlib.ExitStack()
  atexit.register(stack.close)
  folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="paxlike-warm-"))
  return stack.enter_context(served(pathlib.Path(folder)))


@contextlib.contextmanager
def served(folder: pathlib.Path, *modules: str) -> Iterator[pathlib.Path]:
  """Starts the process, with more `modules` imported; yields the program, a file in `folder`."""
  address, file = folder / "socket", folder / "python"
  # JAX reads these variables as it is imported.
  read = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
  client = shlex.join([sys.executable, "-IS", str(_CLIENT), str(address), json.dumps(read)])
  file.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
  file.chmod(0o755)
  server = subprocess.Popen(
    [sys.executable, "-m", "helpers.warm_python", str(address), *_IMPORTED, *modules],
    env=os.environ | {"PYTHONPATH": f"{REPOSITORY / 'tests'}:{REPOSITORY}"},
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  with server:
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    yield file
    server.terminate()


def _serve(address: str, path: list[str]):
  """Accepts programs, until whoever started this ends; returns, in a fork, to run one.

  Args:
    address: The path of the socket.
    path: Where Python's own modules are.
  """
  listener = socket.socket(socket.AF_UNIX)
  listener.bind(address)
  listener.listen(64)
  gc.freeze()
  print("ready", flush=True)
  signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  while listener in select.select([listener, 0], [], [])[0]:
    connection, _ = listener.accept()
    if os.fork() == 0:
      listener.close()
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      return _become(connection, path)
    connection.close()
  sys.exit()


def _become(connection: socket.socket, path: list[str]):
  """Forks a program, to return in it; the parent sends its status, and ends."""
  size, streams, _, _ = socket.recv_fds(connection, 4, 3)
  asked = json.loads(connection.recv(int.from_bytes(size), socket.MSG_WAITALL))
  program = os.fork()
  if program:
    ended = os.pidfd_open(program)
    if ended not in select.select([connection, ended], [], [])[0]:
      os.kill(program, signal.SIGKILL)  # Nobody waits for it any more.
    with contextlib.suppress(BrokenPipeError):
      connection.send(os.waitpid(program, 0)[1].to_bytes(4))
    os._exit(0)
  connection.close()
  for number, stream in enumerate(streams):
    os.dup2(stream, number)
    os.close(stream)
  sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
  sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
  os.chdir(asked["directory"])
  os.environ.clear()
  os.environ.update(asked["environment"])
  sys.argv = asked["arguments"]
  sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(":")), *path]


def _run():
  """Runs the module or script that `sys.argv` names, as python does."""
  if sys.argv[0] == "-m":
    del sys.argv[0]
    sys.path.insert(0, os.getcwd())
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
  else:
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
  for name in sys.argv[2:]:
    importlib.import_module(name)
  ours = {"", os.getcwd(), *os.environ["PYTHONPATH"].split(":")}
  _serve(sys.argv[1], [path for path in sys.path if path not in ours])
  _run()
