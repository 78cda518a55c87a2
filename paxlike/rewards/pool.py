# SPDX-License-Identifier: Apache-2.0
"""Worker processes that compute rewards, each with a time limit."""

import contextlib
import json
import os
import pickle
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from paxlike import rewards, user_code
from paxlike.config import allowed_symbols
from paxlike.errors import UserError

Reward = Callable[[str, Mapping[str, Any]], Any]
_START_SECONDS = 120  # For the import of the reward's module.


class Rewarded(NamedTuple):
  """The reward of an answer.

  Attributes:
    parts: Its named parts; without those of a function that took too long.
    timed_out: Whether it did.
    was_cut: Whether a reward model got only a beginning of it.
  """

  parts: dict[str, float]
  timed_out: bool = False
  was_cut: bool = False

  @property
  def total(self) -> float:
    """The reward."""
    return sum(self.parts.values())


def find(name: str) -> Reward:
  """Returns the reward MODULE.FUNCTION, a name that the user gave; imports the module.

  Raises:
    UserError: There is none.
  """
  module, dot, function = name.rpartition(".")
  if not dot:
    there = ", ".join(rewards.REWARDS)
    raise UserError(f"REWARD={name}: expected MODULE.FUNCTION, or one of {there}.")
  try:
    found = getattr(allowed_symbols.import_module(module), function)
  except (ImportError, AttributeError) as error:
    raise UserError(f"REWARD={name} cannot be imported: {user_code.summary(error)}.") from error
  if not callable(found):
    raise UserError(f"REWARD={name} is not a function.")
  return found


class RewardCalls:
  """Rewards that worker processes are computing."""

  def __init__(self, name: str, workers: "Sequence[_Worker]", answers: Sequence[Any]):
    """Begins to compute the rewards of (answer, record) pairs; `name` is for errors."""
    self._name = name
    self._found: list[Rewarded | None] = [None] * len(answers)
    self._errors: list[BaseException] = []
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(answers)):
      waiting.put(number)

    def work(worker: "_Worker"):
      with contextlib.suppress(queue.Empty):
        while not self._errors:
          number = waiting.get_nowait()
          try:
            self._found[number] = worker.ask(*answers[number])
          except BaseException as error:
            self._errors.append(error)

    used = workers[: len(answers)]
    self._threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in used]
    for thread in self._threads:
      thread.start()

  def result(self) -> list[Rewarded]:
    """Waits for the rewards, and returns them in order.

    Raises:
      UserError: The reward raised an exception, or a worker ended.
    """
    for thread in self._threads:
      thread.join()
    if self._errors:
      error = self._errors[0]
      raise UserError(f"the reward {self._name}: {error}") from error
    return [one for one in self._found if one is not None]


class RewardPool:
  """Processes that compute rewards; a context that ends them."""

  def __init__(self, reward: Reward, *, num_workers: int, seconds: float):
    """Starts no process yet.

    Args:
      reward: A function of a module, which the workers import.
      num_workers: The number of processes.
      seconds: Time limit of one reward; the process is then killed, and the reward is 0.

    Raises:
      UserError: The function is not that of a module.
    """
    of: Any = reward if hasattr(reward, "__qualname__") else type(reward)
    self._name = f"{of.__module__}.{of.__qualname__}"
    importable = UserError(
      f"worker processes cannot import the reward {self._name}: make it a function (def) of a"
      " module, not of a script or of another function."
    )
    if of.__module__ == "__main__" or "<" in self._name:
      raise importable
    try:
      pickled = pickle.dumps(reward)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
      raise importable from error
    self._workers = [_Worker(pickled, seconds) for _ in range(num_workers)]

  def begin(self, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> RewardCalls:
    """Begins to compute the rewards of (answer, record) pairs; those begun before have ended."""
    return RewardCalls(self._name, self._workers, answers)

  def __call__(self, answers: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Rewarded]:
    """Returns the rewards of (answer, record) pairs; see `RewardCalls.result`."""
    return self.begin(answers).result()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *unused: object):
    for worker in self._workers:
      worker.close()


class _Worker:
  """A process that computes one reward at a time."""

  def __init__(self, reward: bytes, seconds: float):
    self._reward = reward
    self._seconds = seconds
    self._process: subprocess.Popen[bytes] | None = None
    self._starting = threading.Lock()
    self._is_closed = False

  def ask(self, answer: str, record: Mapping[str, Any]) -> Rewarded:
    """Returns a reward.

    Raises:
      UserError: The reward failed.
    """
    if self._process is None:
      with self._starting:
        if self._is_closed:
          raise UserError("the run has ended.")
        self._process = self._started()
      self._write(self._reward.hex())
      if self._line(_START_SECONDS) is None:
        self.stop()
        raise UserError(f"its module took more than {_START_SECONDS} s to import.")
    self._write(json.dumps([answer, record]))
    said = self._line(self._seconds)
    if said is None:
      self.stop()
      return Rewarded({}, timed_out=True)
    if not said.endswith(b"\n"):
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._process.wait(timeout=5)
      status = self._process.returncode
      self.stop()
      raise UserError(f"its worker process ended with status {status}; see the messages above.")
    found = json.loads(said)
    if "error" in found:
      raise UserError(found["error"])
    return Rewarded(found["parts"])

  def _write(self, line: str):
    assert self._process is not None and self._process.stdin is not None
    with contextlib.suppress(
      BrokenPipeError
    ):  # That it has ended is noticed as it does not answer.
      self._process.stdin.write(line.encode() + b"\n")
      self._process.stdin.flush()

  def _line(self, seconds: float) -> bytes | None:
    """Returns the next line of the process, cut off if it ended; None if it took too long."""
    process = self._process
    assert process is not None and process.stdout is not None
    said, until = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
      selector.register(process.stdout, selectors.EVENT_READ)
      while not said.endswith(b"\n"):
        if not selector.select(max(0.0, until - time.monotonic())):
          return None
        if not (more := os.read(process.stdout.fileno(), 2**16)):
          break
        said += more
    return said

  def _started(self) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
      [sys.executable, "-P", "-m", "paxlike.rewards.worker"],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      # Unbuffered, since what a reward prints would be lost when the process is killed.
      env={**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"},
      start_new_session=True,  # Ctrl-C ends the run, which ends its workers.
    )

  def close(self):
    """Kills the process for good, also while another thread uses it."""
    with self._starting:
      self._is_closed = True
      self.stop()

  def stop(self):
    """Kills the process, if it has been started."""
    process, self._process = self._process, None
    if process is None:
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, signal.SIGKILL)  # Also what the reward has started.
    process.wait()
    for pipe in (process.stdin, process.stdout):
      if pipe is not None:
        with contextlib.suppress(OSError):
          pipe.close()
