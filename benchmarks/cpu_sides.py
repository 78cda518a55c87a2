# SPDX-License-Identifier: Apache-2.0
"""The sides of benchmarks/cpu.py: processes that take a train step when they are told to."""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple, Self

WARM_UP_STEPS = 4


class Turn(NamedTuple):
  """What one step took, in seconds of the clock and of all threads."""

  wall: float
  cpu: float
  loss: float


class Worker:
  """A process of benchmarks/cpu_worker.py.

  Attributes:
    facts: What it tells of itself.
  """

  def __init__(self, kind: str, task: dict[str, Any], *, python: str = sys.executable):
    """`kind` and `task` are for the worker, which `python` runs."""
    self._kind = kind
    worker = pathlib.Path(__file__).with_name("cpu_worker.py")
    # Threads of PyTorch that wait for each other sleep: spinning, their way, doubles its
    # CPU-seconds on a machine that others use too.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}
    self._process = subprocess.Popen(
      [python, worker, kind],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      env=environment,
    )
    self._say(task)
    self.facts: dict[str, Any] = self._read()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self._process.communicate()

  def turn(self) -> Turn:
    """Takes one step."""
    self._say("step")
    return Turn(**self._read())

  def _say(self, what: Any):
    assert self._process.stdin is not None
    print(json.dumps(what), file=self._process.stdin, flush=True)

  def _read(self) -> dict[str, Any]:
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      raise SystemExit(f"cpu.py: the process of {self._kind} has failed.")
    return json.loads(line)


class MaxText:
  """MaxText's own program, held still outside its turns.

  Attributes:
    facts: Its versions and its first loss.
  """

  def __init__(self, python: str, settings: list[str], *, num_steps: int, folder: str):
    name = "maxtext.trainers.pre_train.train"
    # It computes ahead of its log, so that what follows the last line must not be its end.
    total = num_steps + WARM_UP_STEPS + 5
    own = [f"steps={total}", "run_name=cpu", f"base_output_directory={folder}"]
    self._process = subprocess.Popen(
      [python, "-m", name, *settings, *own],
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      cwd=folder,
      env=os.environ | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"},
    )
    script = "import importlib.metadata as m; print(m.version('maxtext'), m.version('jax'))"
    versions = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True)
    maxtext, jax = versions.stdout.split()
    self.facts = {"maxtext": maxtext, "jax": jax, "first_loss": self._line()}
    for _ in range(WARM_UP_STEPS):
      self._line()
    self._process.send_signal(signal.SIGSTOP)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    self._process.kill()
    self._process.communicate()

  def turn(self) -> Turn:
    """Lets it run until it tells of one more step."""
    wall, cpu = time.perf_counter(), self._cpu_seconds()
    self._process.send_signal(signal.SIGCONT)
    loss = self._line()
    self._process.send_signal(signal.SIGSTOP)
    return Turn(time.perf_counter() - wall, self._cpu_seconds() - cpu, loss)

  def _cpu_seconds(self) -> float:
    stat = pathlib.Path(f"/proc/{self._process.pid}/stat").read_text()
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

  def _line(self) -> float:
    """Waits for the log line of a step, and returns its loss."""
    assert self._process.stdout is not None
    tail = collections.deque(maxlen=10)
    for line in self._process.stdout:
      if "completed step:" in line:
        return float(line.split(" loss: ")[1].split(",")[0])
      tail.append(line)
    raise SystemExit(f"cpu.py: MaxText has failed:\n{''.join(tail)}")
