# SPDX-License-Identifier: Apache-2.0
"""Has a program run by the process of warm_python.py: python -IS warm_client.py ADDRESS READ ...

READ is JSON of the variables that the process has read as it imported; with others, and for what
the process does not run, Python starts as always.
"""

import json
import os
import signal
import socket
import sys

address, read, *arguments = sys.argv[1:]
mine = {name: value for name, value in os.environ.items() if name.startswith("JAX_")}
if mine != json.loads(read) or not (arguments[0] == "-m" or arguments[0].endswith(".py")):
  os.execv(sys.executable, [sys.executable, *arguments])
asked = {"arguments": arguments, "directory": os.getcwd(), "environment": dict(os.environ)}
text = json.dumps(asked).encode()
with socket.socket(socket.AF_UNIX) as connection:
  connection.connect(address)
  socket.send_fds(connection, [len(text).to_bytes(4)], [0, 1, 2])
  connection.sendall(text)
  status = int.from_bytes(connection.recv(4) or sys.exit(f"{address} has ended."))
if os.WIFSIGNALED(status):
  if os.WTERMSIG(status) != signal.SIGKILL:
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
  os.kill(os.getpid(), os.WTERMSIG(status))
sys.exit(os.WEXITSTATUS(status))
