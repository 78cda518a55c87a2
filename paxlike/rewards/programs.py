# SPDX-License-Identifier: Apache-2.0
"""A reward of programs: the share of a record's tests that an answer's code passes."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from paxlike.config.configurable import configurable
from paxlike.errors import UserError

SECONDS = 5  # CPU and wall time of all tests of an answer.
MEMORY_BYTES = 2**29
_FILE_BYTES = 2**20
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
# Each test is run in the namespace of the code; what a test defines, later ones see.
_PROGRAM = """
import ctypes, json, os, resource, signal, sys
code, tests, token, limits = json.load(sys.stdin)
if sys.platform == "linux":
  clone_newuser, clone_newnet = 0x10000000, 0x40000000
  ctypes.CDLL(None).unshare(clone_newuser | clone_newnet)
signal.alarm(limits["RLIMIT_CPU"] + 1)
for kind, value in limits.items():
  resource.setrlimit(getattr(resource, kind), (value, value))
out = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
space = {"__name__": "answer"}
try:
  exec(compile(code, "answer", "exec"), space)
except BaseException:
  os._exit(0)
for number, test in enumerate(tests):
  try:
    exec(compile(test, "test", "exec"), space)
  except BaseException:
    continue
  print(number, token, file=out, flush=True)
os._exit(0)
"""


@configurable
class PythonTests:
  """The share of the record's `tests` that pass after the answer's code; 0 if all take too long.

  The code is that in the last ```` ``` ```` block, else the whole answer. Tests are a list of
  statements such as "assert add(1, 2) == 3". They run in a process of their own with limits of
  time, memory and file sizes, an empty environment and an empty working directory, and without a
  network if Linux lets users make namespaces. This does not stop code that reads or writes files,
  or looks for a way to claim that its tests pass: run such models in a container. Therefore the
  environment variable PAXLIKE_ALLOW_CODE must be 1.
  """

  def __call__(self, answer: str, record: Mapping[str, Any]) -> float:
    """Returns the reward."""
    if os.environ.get("PAXLIKE_ALLOW_CODE") != "1":
      raise UserError(
        "python_tests runs code of answers and records, which can do what you can: set"
        " PAXLIKE_ALLOW_CODE=1 to allow that, best in a container."
      )
    tests = record.get("tests")
    if not isinstance(tests, Sequence) or isinstance(tests, str) or not tests:
      raise UserError("the record has no `tests`, a list of Python statements.")
    blocks = _BLOCK.findall(answer)
    return passed(blocks[-1] if blocks else answer, [str(test) for test in tests]) / len(tests)


def passed(code: str, tests: Sequence[str]) -> int:
  """Returns how many of the tests pass after `code` has run."""
  limits = {
    "RLIMIT_CPU": SECONDS,
    "RLIMIT_AS": MEMORY_BYTES,
    "RLIMIT_FSIZE": _FILE_BYTES,
    "RLIMIT_CORE": 0,
  }
  token = secrets.token_hex(16)  # So that code does not pass by writing numbers.
  with tempfile.TemporaryDirectory() as folder:
    process = subprocess.Popen(
      [sys.executable, "-I", "-S", "-c", _PROGRAM],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      cwd=folder,
      env={},
      text=True,
      errors="replace",
      start_new_session=True,
    )
    try:
      out, _ = process.communicate(json.dumps([code, list(tests), token, limits]), timeout=SECONDS)
    except subprocess.TimeoutExpired:
      out = ""
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # Also what the code has started.
      process.communicate()
  lines = {line for line in out.splitlines() if line.endswith(token)}
  return len({line.split()[0] for line in lines} & {str(n) for n in range(len(tests))})
