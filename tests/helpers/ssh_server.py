# SPDX-License-Identifier: Apache-2.0
"""A real sshd on the loopback address, with a key of its own."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

SSHD = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
HAS_SSH = SSHD is not None and shutil.which("ssh") is not None and os.geteuid() == 0


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[str]:
  """Context of a server whose files are in a folder; yields the options of ssh for it."""
  for name in ("host", "user"):
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
    subprocess.run(command, check=True)
  keys = folder / "authorized_keys"
  keys.write_bytes((folder / "user.pub").read_bytes())
  keys.chmod(0o600)
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  pathlib.Path("/run/sshd").mkdir(exist_ok=True)
  settings = {
    "ListenAddress": "127.0.0.1",
    "HostKey": folder / "host",
    "AuthorizedKeysFile": keys,
    "StrictModes": "no",
    "UsePAM": "no",
    "PidFile": folder / "sshd.pid",
  }
  options = [f"-o{name}={value}" for name, value in settings.items()]
  command = [SSHD or "", "-D", "-e", "-f", "/dev/null", "-p", str(port), *options]
  with (folder / "sshd.log").open("w") as log:
    server = subprocess.Popen(command, stdout=log, stderr=log)
  try:
    end = time.monotonic() + 20
    while True:
      with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        break
      assert server.poll() is None and time.monotonic() < end, (folder / "sshd.log").read_text()
      time.sleep(0.1)
    safe = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    yield f"-p {port} -i {folder}/user {safe}"
  finally:
    server.terminate()
    server.wait()
